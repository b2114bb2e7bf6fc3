"""Before a model serves with compressed caches: does it say at full rank what it says without one?

Families compute more than transformers' interfaces tell: sinks, biases, keys shared by layers. What is known is served or
refused by name (:mod:`lowrank_kv.hf.call_checks`, :mod:`lowrank_kv.hf.geometry`). This is for what nobody has thought of: a
short random prompt and some decoded tokens run through the model twice, with transformers' own cache and with a compressed
one that keeps every coefficient.

Shapes: B batch, T tokens, C joint width, V vocabulary.
"""

import weakref

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lowrank_kv.codec import LayerCodec, TokenGate
from lowrank_kv.hf.attention import PREPARED, has_compressors
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.ragged_layer import RaggedLayer
from lowrank_kv.hf.geometry import attention_modules, geometry_of
from lowrank_kv.hf.prepare import restore
from lowrank_kv.utils.dispatch_log import LOGGER
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.eval_mode import evaluating

# A prompt, single tokens, and a few at once.
_CHUNKS = (7, 1, 1, 1, 3)
# How far logits may be apart, in shares of their size. At full rank only rounding differs; where a term of attention is left
# out, a model in 16 bits is off by several times as much.
_MAX_ERROR = {torch.float64: 1e-4, torch.float32: 1e-3}
_MAX_ERROR_16_BITS = 0.1
# Ten passes of such a model take a few seconds on a processor, and nothing on a GPU.
_MAX_PARAMETERS_ON_CPU = 4_000_000_000

_checked: weakref.WeakSet = weakref.WeakSet()


class _Everything:
    """A codec that keeps states as they are."""

    def __init__(self, width: int):
        self.width = width

    def encode(self, states_BTC: Tensor) -> tuple[Tensor, Tensor]:
        return states_BTC, torch.full(states_BTC.shape[:2], self.width, device=states_BTC.device)

    def decoder(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.eye(self.width, dtype=dtype, device=device)

    def energies(self) -> Tensor:
        return torch.ones(self.width)

    def token_gate(self) -> TokenGate | None:
        return None


def check_full_rank(model: PreTrainedModel) -> None:
    """Run the check, once for each model object; the model is left as it was.

    It is left out, with a line in the log `lowrank_kv`, where weights have no memory (device `meta`, offloaded layers), and
    on a CPU for models of more than four billion parameters. A model that has compressors was checked when it got them.

    Raises:
        UserError: the model is not served rightly, or is refused while it runs.
    """
    if model in _checked or has_compressors(model):
        return
    why = _reason_to_skip(model)
    if why is not None:
        LOGGER.info("the self-check of %s is left out: %s", type(model).__name__, why)
        return
    error = full_rank_error(model, _CHUNKS)
    if not error <= max_error(model.dtype):  # NaN is not
        raise UserError(
            f"with a compressed cache that keeps everything, {type(model).__name__} does not say what it says with its own: "
            f"logits differ by {error:.2g} of their size, {max_error(model.dtype):g} at most; its attention computes "
            f"something that a compressed cache does not know, so use a model of another family (`self_check=False` leaves "
            f"this out)"
        )
    _checked.add(model)


def max_error(dtype: torch.dtype) -> float:
    """The largest :func:`full_rank_error` of a model in `dtype` that is served rightly."""
    return _MAX_ERROR.get(dtype, _MAX_ERROR_16_BITS)


def _reason_to_skip(model: PreTrainedModel) -> str | None:
    if any(parameter.is_meta for parameter in model.parameters()):
        return "some of its weights have no memory here"
    size = sum(parameter.numel() for parameter in model.parameters())
    if model.device.type == "cpu" and size > _MAX_PARAMETERS_ON_CPU:
        return f"{size:,} parameters on a CPU"
    return None


@torch.no_grad()
def full_rank_error(model: PreTrainedModel, chunks: tuple[int, ...], batch: int = 1) -> float:
    """How far a model's logits over a compressed cache that keeps everything are from those over its own: the median over
    tokens of ‖difference‖ / ‖logits‖. In a mixture of experts rounding may send single tokens to another expert.

    Args:
        chunks: tokens of the calls.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(vocabulary, (batch, sum(chunks)), generator=generator).to(model.device)

    def logits(cache: DynamicCache | LowRankCache) -> Tensor:
        parts = ids_BT.split(chunks, dim=1)
        return torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in parts], dim=1).float()

    was_prepared = all(PREPARED in module.__dict__ for module in attention_modules(model).values())
    geometry = geometry_of(model)
    with evaluating(model):
        expected_BTV = logits(DynamicCache(config=model.config.get_text_config(decoder=True)))
        try:
            codec = LayerCodec(key=_Everything(geometry.width), value=_Everything(geometry.width))
            found_BTV = logits(LowRankCache(model, {index: RaggedLayer(codec) for index in geometry.layers}))
        finally:
            if not was_prepared:
                restore(model)
    return float(((found_BTV - expected_BTV).norm(dim=2) / expected_BTV.norm(dim=2)).median())
