"""The cache of a DynaKV model: each token's keys and values at the rank its gate chose, or by a plan of bits."""

from collections.abc import Callable, Mapping

from transformers import PreTrainedModel

from dynakv.compressor import TokenCompressor
from dynakv.config import DynaKVConfig
from dynakv.layer_compressor import LayerCompressor
from lowrank_kv.calibration.activation_moments import KEY, KEY_VALUE
from lowrank_kv.hf.attention import TRANSFORM, has_compressors
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.ragged_layer import RaggedLayer
from lowrank_kv.hf.cache.windowed.layer import WindowedLayer, layers_of
from lowrank_kv.hf.cache.windowed.plan import InitialBasis, Plan
from lowrank_kv.hf.geometry import attention_modules, geometry_of
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


def settings_of(model: PreTrainedModel) -> DynaKVConfig:
    """The settings of an attached model's compressors. Raises :class:`UserError` when the model has none."""
    return token_compressors(model)[0].config


def token_compressors(model: PreTrainedModel) -> list[TokenCompressor]:
    """The compressors of keys and of values, layer by layer, or of the rows of several layers.

    Raises:
        UserError: the model has none.
    """
    return [side for layer in compressors(model).values() for side in layer.sides.values()]


def forget_changed_matrices(model: PreTrainedModel) -> None:
    """Let caches that are made now rest on parameters as they are, also where these were written through `.data`."""
    for compressor in token_compressors(model):
        compressor.projection.forget_if_changed()


def initial_bases(layers: Mapping[int, LayerCompressor]) -> dict[int, tuple[InitialBasis, InitialBasis]]:
    """What caches of compressors with plans start from: layer index → (of keys, of values)."""
    found, group = {}, []
    for index, layer in layers.items():
        sides = layer.sides
        if KEY in sides:
            found[index] = tuple(side.initial_basis() for side in sides.values())
            continue
        group.append(index)
        if KEY_VALUE in sides:  # of the last layer of a group
            found |= dict(zip(group, sides[KEY_VALUE].initial_bases(len(group)), strict=True))
            group = []
    return found


class DynaKVCache(LowRankCache):
    """A cache filled by the model's own compressors; `generate()` of an attached model makes one by itself.

    Where gates choose ranks it is ragged. Where a plan of bits is kept of every token, first and latest tokens stay at full
    rank (`exact_tokens`).
    """

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "DynaKVCache":
        return cls.maker(model)()

    @classmethod
    def maker(cls, model: PreTrainedModel) -> Callable[[], "DynaKVCache"]:
        """A maker of caches that keep to the compressors as they are set now, also once these are taken off the model."""
        layers, config = compressors(model), settings_of(model)
        forget_changed_matrices(model)
        if not config.has_plan:
            codecs = {index: layer.codec() for index, layer in layers.items()}
            return lambda: cls(model, {index: RaggedLayer(codec) for index, codec in codecs.items()})
        plan = Plan(config=config.windowed, geometry=geometry_of(model), layers=initial_bases(layers))
        return lambda: cls(model, layers_of(plan, WindowedLayer))
