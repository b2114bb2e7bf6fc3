"""The cache of a DynaKV model: each token's keys and values at the rank its gate chose."""

from transformers import PreTrainedModel

from dynakv.compressor import LayerCompressor, TokenCompressor
from lowrank_kv.hf.attention import TRANSFORM, has_compressors
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.ragged_layer import RaggedLayer
from lowrank_kv.hf.geometry import attention_modules
from lowrank_kv.utils.errors import UserError


def is_attached(model: PreTrainedModel) -> bool:
    """Whether the model has compressors."""
    return has_compressors(model)


def compressors(model: PreTrainedModel) -> dict[int, LayerCompressor]:
    """Layer index → its compressor. Raises :class:`UserError` when the model has none."""
    found = {
        index: module._modules[TRANSFORM]
        for index, module in attention_modules(model).items()
        if TRANSFORM in module._modules
    }
    if not found:
        raise UserError(
            f"{type(model).__name__} has no DynaKV compressor; call dynakv.attach(model, checkpoint) or load a full "
            f"DynaKV checkpoint"
        )
    return found


def token_compressors(model: PreTrainedModel) -> list[TokenCompressor]:
    """The compressors of keys and of values, layer by layer. Raises :class:`UserError` when the model has none."""
    return [side for layer in compressors(model).values() for side in (layer.key, layer.value)]


class DynaKVCache(LowRankCache):
    """A ragged cache filled by the model's own compressors; `generate()` of an attached model makes one by itself."""

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "DynaKVCache":
        return cls(model, {index: RaggedLayer(layer.codec()) for index, layer in compressors(model).items()})
