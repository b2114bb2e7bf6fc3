"""The compressors of a model: where they are, their settings, and what caches of them start from."""

from collections.abc import Mapping

from transformers import PreTrainedModel

from dynakv.compressor import TokenCompressor
from dynakv.config import DynaKVConfig
from dynakv.layer_compressor import LayerCompressor
from lowrank_kv.calibration.activation_moments import KEY, KEY_VALUE
from lowrank_kv.hf.attention import TRANSFORM, has_compressors
from lowrank_kv.hf.cache.windowed.plan import InitialBasis
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
