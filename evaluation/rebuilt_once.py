"""Decode attention for whoever measures what a cache loses: it rebuilds the keys and values of compressed tokens once.

Serving rebuilds them at every step, since a compressed cache is there to spare the memory they take. A measurement has that
memory. Rows that never change give the same keys and values at every step, and most of the arithmetic of a comparison was to
rebuild them again.

Shapes: H query heads, G KV heads, J = H/G query heads of a KV head, Q queries, D head dim, P parts, N low-rank tokens, F
full-rank tokens, R rank.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

from lowrank_kv.hf.cache.windowed.adaptive_store import AdaptiveStore
from lowrank_kv.hf.cache.windowed.layer import WindowedLayer
from lowrank_kv.hf.cache.windowed.store import TokenStore
from lowrank_kv.ops.lowrank_attention import LowRankTokens, Operands, lowrank_attention
from lowrank_kv.ops.native.reading import rows_of
from lowrank_kv.ops.rotation import slice_positions
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.growable_tensor import GrowingTensor

# Stores whose rows, and the decoder of these, stay as they are once they are written.
_LASTING = (TokenStore, AdaptiveStore)


@contextlib.contextmanager
def rebuilt_once(caches: Sequence[Cache]) -> Iterator[None]:
    """While this lasts, the layers of these caches whose rows never change attend to what was rebuilt of them once.

    Args:
        caches: of one sequence each, which only read on meanwhile: nothing is cropped or reordered.
    """
    layers = []
    for cache in caches:
        decoded = DecodedRows()
        for layer in filter(_lasts, cache.layers):
            layer.attends = RebuiltOnce(decoded)
            layers.append(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.attends


def _lasts(layer: object) -> bool:
    """Whether a layer's rows only become more."""
    if not isinstance(layer, WindowedLayer) or layer.config.eviction.is_on:
        return False
    return all(type(store) in _LASTING for each in layer.sequences for store in (each.key, each.value))


class DecodedRows:
    """The rows that were decoded last: layers that share rows read the same ones, one after another."""

    def __init__(self):
        self._of: tuple[Coefficients | None, int, int] = None, 0, 0
        self._row_PNR: Tensor | None = None

    def of(self, coef: Coefficients, start: int) -> Tensor:
        """Rows from `start` on, (P, N, R) fp32."""
        of = coef, start, coef.length
        if self._of != of:
            self._of, self._row_PNR = of, rows_of(coef, start, dtype=torch.float32).float()
        return self._row_PNR


class RebuiltOnce:
    """Attends as :func:`lowrank_kv.ops.lowrank_attention.lowrank_attention` does, for one sequence in one layer, in fp32.

    Args:
        decoded: shared by the layers of a cache.
    """

    def __init__(self, decoded: DecodedRows):
        self._decoded = decoded
        self._key: GrowingTensor | None = None  # rotated, (G, N, D) fp32
        self._value: GrowingTensor | None = None

    def __call__(self, query_HQD: Tensor, tokens: LowRankTokens, scoring: Scoring) -> Tensor:
        if tokens.parts_differ or scoring.softcap is not None or scoring.sink_H is not None:
            return lowrank_attention(query_HQD, tokens, scoring)
        self._rebuild_new(tokens)
        heads, queries, head_dim = query_HQD.shape
        key_1GTD, value_1GTD = _all_of(self._key, tokens.keys)[None], _all_of(self._value, tokens.values)[None]
        query_1GMD = query_HQD.float().reshape(1, key_1GTD.shape[1], -1, head_dim)  # M = J·Q rows share a KV head
        mask_MT = None if tokens.mask_QT is None else tokens.mask_QT.repeat(query_1GMD.shape[2] // queries, 1)
        output_1GMD = F.scaled_dot_product_attention(
            query_1GMD, key_1GTD, value_1GTD, attn_mask=mask_MT, scale=scoring.scaling
        )
        return output_1GMD.view(heads, queries, head_dim).to(query_HQD.dtype)

    def _rebuild_new(self, tokens: LowRankTokens) -> None:
        """Rebuild the tokens that have become low rank since the last call."""
        start, end = 0 if self._key is None else self._key.length, tokens.keys.coef.length
        if self._key is not None and start == end:
            return
        key_GND, value_GND = (self._rebuilt(each, start) for each in (tokens.keys, tokens.values))
        if tokens.rotation is not None:
            key_GND = tokens.rotation.rotate(key_GND, slice_positions(tokens.positions, start, end))
        if self._key is None:
            self._key, self._value = (GrowingTensor(each.contiguous(), dim=1) for each in (key_GND, value_GND))
        else:
            self._key.append(key_GND)
            self._value.append(value_GND)

    def _rebuilt(self, operands: Operands, start: int) -> Tensor:
        return operands.rebuilt(self._decoded.of(operands.coef, start))


def _all_of(low_rank: GrowingTensor, operands: Operands) -> Tensor:
    """Low-rank tokens and the full-rank ones behind them, whose place the next low-rank ones take, (G, N + F, D)."""
    full_GFD = operands.full_GFD
    [room_GFD] = low_rank.room_for(full_GFD.shape[1])
    room_GFD.copy_(full_GFD)
    return low_rank.buffer[:, : low_rank.length + full_GFD.shape[1]]
