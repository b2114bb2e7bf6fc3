"""What sits on each attention module: the compressors of its keys and values, or its share of one for several layers.

Shapes: B batch, G KV heads, T tokens, D head dim, C = G·D joint width.
"""

import abc
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dynakv.compressor import TokenCompressor
from dynakv.config import DynaKVConfig
from dynakv.planned_compressor import PlannedCompressor
from dynakv.ranked_compressor import RankedCompressor
from lowrank_kv.calibration.activation_moments import KEY, KEY_VALUE, VALUE
from lowrank_kv.codec import LayerCodec
from lowrank_kv.hf.cache.layer import join_heads, split_heads
from lowrank_kv.hf.geometry import KVGeometry, layer_groups
from lowrank_kv.hf.rope import Rope, rotated, unrotated
from lowrank_kv.utils.errors import UserError

Place = tuple[int, str]  # of a compressor: layer index, and what of it is compressed


class RebuiltStates(NamedTuple):
    """What rows of several layers give back of one layer's keys, before rotation, and values, (B, T, C) each; and the soft
    and hard rates of these rows, (2,), as :class:`dynakv.objective.RateRecorder` records them."""

    key_BTC: Tensor
    value_BTC: Tensor
    soft_2: Tensor
    hard_2: Tensor


class LayerCompressor(nn.Module, abc.ABC):
    """Compresses one layer's keys (before rotation) and values; sits on the attention module."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.head_dim = head_dim

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LayerCompressor":
        # `model.to(torch.bfloat16)` is of the backbone: a basis and its inverse, rounded apart, would not fit together. And
        # `model.double()` would stay, as no way back to fp32 could be told from that.
        def moved(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            if found.dtype == torch.float32 or not found.is_floating_point():
                return found
            return found.float() if tensor.is_meta else tensor.to(found.device, torch.float32)

        return super()._apply(moved, recurse)

    @property
    def sides(self) -> dict[str, TokenCompressor]:
        """The compressors that are this layer's own, by what they compress."""
        return dict(self.named_children())

    @abc.abstractmethod
    def forward(
        self, key_BGTD: Tensor, value_BGTD: Tensor, rope: Rope | None, position_BT: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compress and rebuild the rotated keys and the values of a pass without a cache.

        Args:
            position_BT: each token's place in its own document, int64; None where all are of one.

        Returns:
            rebuilt keys and values, same shapes and dtypes; soft and hard retain rates of (keys, values), each (2,), which
            :class:`dynakv.objective.RateRecorder` records.
        """

    def _as_heads(self, rebuilt: RebuiltStates, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        key_BGTD, value_BGTD = (split_heads(each, self.head_dim) for each in (rebuilt.key_BTC, rebuilt.value_BTC))
        return rotated(key_BGTD, rope), value_BGTD, rebuilt.soft_2, rebuilt.hard_2


class SingleLayerCompressor(LayerCompressor):
    """The compressor of one layer's keys, and that of its values."""

    def __init__(self, width: int, head_dim: int, config: DynaKVConfig, layer_idx: int):
        super().__init__(head_dim)
        kind = kind_of_compressor(config)
        self.key = kind(width, config, f"layer {layer_idx} keys")
        self.value = kind(width, config, f"layer {layer_idx} values")

    def forward(
        self, key_BGTD: Tensor, value_BGTD: Tensor, rope: Rope | None, position_BT: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        key_BTC, *key_rates = self.key(join_heads(unrotated(key_BGTD, rope)), position_BT)
        value_BTC, *value_rates = self.value(join_heads(value_BGTD), position_BT)
        soft_2, hard_2 = (torch.stack(pair) for pair in zip(key_rates, value_rates, strict=True))
        return self._as_heads(RebuiltStates(key_BTC, value_BTC, soft_2, hard_2), rope)

    def codec(self) -> LayerCodec:
        """This layer's codec for a cache of ranks: it reads the current parameters, and keeps to the present settings."""
        config = self.key.config
        return LayerCodec(
            key=copy.copy(self.key),
            value=copy.copy(self.value),
            quantization=config.quantization,
            eviction=config.eviction,
            exact_prefill=config.reads_prompts_exactly,
            settings=config,
        )


class JointLayerCompressor(LayerCompressor):
    """One of several layers whose keys and values are rows together; the last of them has the compressor of these rows.

    A layer cannot rebuild its keys from rows of which later layers have not made their part. In a pass without a cache rows
    are those of an earlier pass of the uncompressed model, as a prompt's are: that is read exactly, and then compressed.
    """

    def __init__(self, width: int, head_dim: int, config: DynaKVConfig, group: tuple[int, ...], layer_idx: int):
        super().__init__(head_dim)
        self.layer_idx = layer_idx
        if layer_idx == group[-1]:
            name = f"layers {group[0]} to {layer_idx}" if len(group) > 1 else f"layer {layer_idx}"
            self.key_value = PlannedCompressor(2 * len(group) * width, config, f"{name}, keys and values")

    def forward(
        self,
        key_BGTD: Tensor,
        value_BGTD: Tensor,
        rope: Rope | None,
        position_BT: Tensor | None,
        rebuilt: Mapping[int, RebuiltStates] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As :meth:`LayerCompressor.forward`.

        Args:
            rebuilt: layer index → what its keys and values are replaced with (:func:`dynakv.joint_rows.rebuilt_states`).

        Raises:
            UserError: it is not told what was rebuilt.
        """
        if rebuilt is None:
            raise UserError(
                f"layer {self.layer_idx} is coded together with others, whose states are not there yet in a pass without a "
                f"cache; let the model fill one, as `generate()` does"
            )
        mine = rebuilt[self.layer_idx]
        moved = (each.to(key_BGTD.device) for each in mine)
        return self._as_heads(RebuiltStates(*moved), rope)


def kind_of_compressor(config: DynaKVConfig) -> type[TokenCompressor]:
    """What compresses keys, or values, by these settings."""
    return PlannedCompressor if config.has_plan else RankedCompressor


def layer_compressor(geometry: KVGeometry, config: DynaKVConfig, layer_idx: int) -> LayerCompressor:
    """What one attention module of a model of this shape needs."""
    if not config.joint_layers:
        return SingleLayerCompressor(geometry.width, geometry.head_dim, config, layer_idx)
    [group] = (each for each in layer_groups(geometry.layers, config.joint_layers) if layer_idx in each)
    return JointLayerCompressor(geometry.width, geometry.head_dim, config, group, layer_idx)


def by_layer(geometry: KVGeometry, config: DynaKVConfig) -> dict[int, tuple[Place, Place]]:
    """Layer index → the places of the compressors of its keys and of its values, in a model of this shape."""
    if not config.joint_layers:
        return {index: ((index, KEY), (index, VALUE)) for index in geometry.layers}
    groups = layer_groups(geometry.layers, config.joint_layers)
    return {index: ((group[-1], KEY_VALUE),) * 2 for group in groups for index in group}


def row_widths(geometry: KVGeometry, config: DynaKVConfig) -> dict[Place, int]:
    """Place → C, of all compressors of a model of this shape, in their order: each has as many widths as it serves."""
    served = Counter(itertools.chain.from_iterable(by_layer(geometry, config).values()))
    return {place: count * geometry.width for place, count in served.items()}


def projection_widths(geometry: KVGeometry, config: DynaKVConfig) -> dict[str, int]:
    """Where each projection is among the tensors of a checkpoint, such as `layers.0.key` → C."""
    return {f"layers.{index}.{side}": width for (index, side), width in row_widths(geometry, config).items()}
