"""transformers' own quantized caches, with the settings of the library that most people use.

A group is of a token's neighbouring numbers (quanto's axis 0, hqq's axis 1), of keys, too. `kivi.py` has keys by channel.
"""

import importlib.util
from collections.abc import Callable, Iterator

from torch import Tensor
from transformers import Cache, PreTrainedModel, QuantizedCache

from lowrank_kv.utils.build_locks import await_builds, quanto_folders
from lowrank_kv.utils.errors import UserError, not_installed

# name → (backend, bits, axis of the groups, package)
QUANTIZED = {
    "quanto-int4": ("quanto", 4, 0, "optimum-quanto"),
    "quanto-int2": ("quanto", 2, 0, "optimum-quanto"),
    "hqq-int8": ("hqq", 8, 1, "hqq"),
    "hqq-int4": ("hqq", 4, 1, "hqq"),
    "hqq-int2": ("hqq", 2, 1, "hqq"),
}
_MODULES = {"optimum-quanto": "optimum", "hqq": "hqq"}


def quantized_maker(model: PreTrainedModel, name: str) -> Callable[[], Cache]:
    """Makes `QuantizedCache`s with their own defaults (groups of 64 numbers, the latest 128 tokens in the model's dtype).

    Raises:
        UserError: their library is not installed, or the model has layers that they do not serve.
    """
    backend, bits, axis, package = QUANTIZED[name]
    if importlib.util.find_spec(_MODULES[package]) is None:
        raise not_installed(f"the peer `{name}`", package, extra="eval")
    kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise UserError(
            f"the peer `{name}` is a cache of transformers for layers of full attention only, and this model has others "
            f"({', '.join(sorted(kinds))}); leave the peer out"
        )
    if backend == "quanto":
        await_builds(quanto_folders())
    return lambda: QuantizedCache(backend=backend, config=model.config, nbits=bits, axis_key=axis, axis_value=axis)


def quantized_tensors(cache: QuantizedCache) -> Iterator[Tensor]:
    """All a quantized cache holds: codes as they are packed, scales, zero points and the latest tokens as they are."""
    for layer in cache.layers:
        yield layer.keys
        yield layer.values
        for states in (layer._quantized_keys, layer._quantized_values):
            if isinstance(states, tuple):  # hqq: codes, and a dictionary of the rest
                codes, rest = states
                yield from (codes, rest["scale"], rest["zero"])
            else:  # quanto: a tensor of packed codes that shows the shape of what it stands for
                yield from (states._data._data, states._scale, states._shift)
