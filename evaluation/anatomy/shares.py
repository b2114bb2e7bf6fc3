"""What each token takes of its bytes in each layer (DynaKV, figures 4 and 5), where a method codes tokens on their own.

Shapes: L layers, T tokens, C = G·D joint width. A share is of the bytes of an uncompressed token in the model's dtype.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from lowrank_kv.calibration.activation_moments import KEY, VALUE, observe
from lowrank_kv.codec import Codec
from lowrank_kv.hf.cache.codec_layer import CodecLayer
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.windowed.layer import WindowedLayer
from lowrank_kv.hf.cache.windowed.plan import Plan
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.quantization import Quantization
from lowrank_kv.stores.token_plans import TokenPlans

from ..peers.kivi import KiviLayer
from ..peers.puzzle_kv import PuzzleLayer

# (layer index, ``key`` or ``value``) → joint states (T, C) fp32.
States = Mapping[tuple[int, str], Tensor]
SIDES = (KEY, VALUE)


def states_of(model: PreTrainedModel, ids_T: Tensor, *, sides: tuple[str, ...] = SIDES) -> States:
    """The states of a text in the uncompressed model."""
    found: dict[tuple[int, str], Tensor] = {}

    def keep(index: int, side: str, rows_NC: Tensor) -> None:
        found[index, side] = rows_NC.float().clone()

    observe(model, ids_T[None], keep, sides=sides, progress=False)
    return found


def token_shares(make_cache: Callable[[], Cache], states: States, itemsize: int) -> Tensor | None:
    """Share of its bytes that each token's key and value take once compressed, (L, 2, T) fp32; None where a method does not
    code tokens on their own.

    Tokens that a cache keeps at full rank for where they stand, such as first and latest ones, are counted as compressed.

    Args:
        make_cache: the method.
        states: of the text.
        itemsize: bytes of a number in the model's dtype.
    """
    cache = make_cache()
    if not isinstance(cache, LowRankCache):
        return None
    found = []
    for index in cache.geometry.layers:
        layer = cache.layers[index]
        sides = []
        for position, side in enumerate(SIDES):
            rows_TC = states[index, side]
            if isinstance(layer, (KiviLayer, PuzzleLayer)):
                return None  # a page's tokens share ranges, or factors
            if isinstance(layer, WindowedLayer):
                bytes_T = _of_basis(layer.plan, index, position, states, itemsize)
            elif isinstance(layer, CodecLayer):
                codec = layer.codec.key if side == KEY else layer.codec.value
                bytes_T = _of_codec(codec, layer.codec.quantization, rows_TC, itemsize)
            else:
                return None
            sides.append(bytes_T / (rows_TC.shape[1] * itemsize))
        found.append(torch.stack(sides))
    return torch.stack(found)


def _of_basis(plan: Plan, index: int, position: int, states: States, itemsize: int) -> Tensor:
    """Bytes of a layer's keys (position 0), or values (1); of a row of several, as many for each."""
    initial, tokens = plan.layers[index][position], len(states[index, SIDES[position]])
    parts, _, rank = initial.vectors_PWR.shape
    quantization, read = initial.quantization, [(index, position)]
    if not plan.layers[index][1].holds_rows:
        [group] = (each for each in plan.row_groups() if index in each)
        read = [(of_group, side) for of_group in group for side in range(len(SIDES))]
    if isinstance(quantization, TokenPlans):
        coef_TC = sum(
            states[i, SIDES[side]].to(initial.vectors_PWR.device) @ plan.layers[i][side].vectors_PWR[0]
            for i, side in read
        )
        return quantization.size_K[quantization.classes(coef_TC)].float().cpu() / len(read)
    if isinstance(quantization, BitPlan):
        return torch.full((tokens,), parts * quantization.row_bytes(quantization.num_coefficients) / len(read))
    each = rank * itemsize if quantization is None else quantization.nbytes(rank)
    return torch.full((tokens,), float(parts * each))


def _of_codec(codec: Codec, quantization: Quantization | None, rows_TC: Tensor, itemsize: int) -> Tensor:
    rank_T = codec.encode(rows_TC[None])[1][0]
    if quantization is None:
        return rank_T.float() * itemsize
    return torch.tensor([float(quantization.nbytes(rank)) for rank in rank_T.tolist()])
