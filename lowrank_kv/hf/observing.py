"""What every attention module is given in passes without a compressed cache.

Shapes: B batch, H query heads, G KV heads, T tokens, D head dim.
"""

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.hf.attention import PREPARED
from lowrank_kv.hf.geometry import attention_modules, geometry_of
from lowrank_kv.hf.rope import Rope

# Layer index, rotated queries (B, H, T, D), rotated keys and values (B, G, T, D), and their rotation.
Visit = Callable[[int, Tensor, Tensor, Tensor, Rope | None], None]


@contextlib.contextmanager
def observing(model: PreTrainedModel, visit: Visit) -> Iterator[None]:
    """Context in which `visit` is called with what each compressible layer is given, call by call; one context at a time.

    Args:
        model: prepared (:func:`lowrank_kv.hf.prepare.prepare`).
    """
    modules = attention_modules(model)
    prepared = {index: getattr(modules[index], PREPARED) for index in geometry_of(model).layers}
    try:
        for index, each in prepared.items():
            each.observer = lambda query, key, value, rope, index=index: visit(index, query, key, value, rope)
        yield
    finally:
        for each in prepared.values():
            each.observer = None
