"""Rows of several layers in a pass without a cache: what an earlier pass of the uncompressed model gives them.

Shapes: B batch, G KV heads, T tokens, D head dim, C = G·D joint width.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynakv.layer_compressor import RebuiltStates
from dynakv.model_compressors import compressors, settings_of
from lowrank_kv.calibration.activation_moments import KEY_VALUE
from lowrank_kv.hf.cache.layer import join_heads
from lowrank_kv.hf.geometry import layer_groups
from lowrank_kv.hf.observing import observing
from lowrank_kv.hf.rope import Rope, unrotated

States = dict[int, tuple[Tensor, Tensor]]


@contextlib.contextmanager
def states_of_pass(model: PreTrainedModel) -> Iterator[States]:
    """Context that collects each layer's joint keys before rotation, and values, (B, T, C), of a pass without a cache.

    Args:
        model: prepared (:func:`lowrank_kv.hf.prepare.prepare`).
    """
    found: States = {}

    def keep(index: int, query: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, rope: Rope | None) -> None:
        found[index] = join_heads(unrotated(key_BGTD, rope)).detach(), join_heads(value_BGTD).detach()

    with observing(model, keep):
        yield found


def rebuilt_states(
    model: PreTrainedModel, states: Mapping[int, tuple[Tensor, Tensor]], position_BT: Tensor | None
) -> dict[int, RebuiltStates]:
    """What every layer of a model whose layers are coded together reads of these tokens once they are compressed; carries
    the gradients of the compressors.

    Args:
        model: with compressors.
        states: of :func:`states_of_pass`.
        position_BT: each token's place in its own document, int64; None where all are of one.
    """
    layers, found = compressors(model), {}
    for group in layer_groups(list(layers), settings_of(model).joint_layers):
        compressor = layers[group[-1]].sides[KEY_VALUE]
        device = compressor.projection.weight.device
        row_BTC = torch.cat([each.to(device) for index in group for each in states[index]], dim=-1)
        rebuilt_BTC, soft, hard = compressor(row_BTC, None if position_BT is None else position_BT.to(device))
        parts = rebuilt_BTC.chunk(2 * len(group), dim=-1)
        for index, key_BTC, value_BTC in zip(group, parts[::2], parts[1::2], strict=True):
            found[index] = RebuiltStates(key_BTC, value_BTC, soft.expand(2), hard.expand(2))
    return found
