"""Coefficients in a shared basis with a few directions of each sequence's own.

Shapes: P parts (1 here), N tokens, C coefficients of the shared basis, R that a plan keeps at most, W width.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lowrank_kv.hf.cache.windowed.own_directions import OwnDirections
from lowrank_kv.hf.cache.windowed.plan import InitialBasis
from lowrank_kv.hf.cache.windowed.store import TokenStore
from lowrank_kv.ops.lowrank_attention import Operands
from lowrank_kv.stores.memory_report import BASES
from lowrank_kv.stores.token_plans import TokenPlans


class AdaptiveStore(TokenStore):
    """A :class:`TokenStore` in a planned basis that has, for this sequence, up to `count` directions more.

    Args:
        count: own directions at most.
        least_tokens: how many rows must come first, together, for directions to be found in them.

    Attributes:
        own: the directions; None before the prompt is compressed, and where none pays.
    """

    def __init__(self, initial: InitialBasis, *, count: int, least_tokens: int, **settings: Any):
        super().__init__(initial, **settings)
        self.count, self.least_tokens = count, least_tokens
        self.own: OwnDirections | None = None

    def look_at(self, coef_PNR: Tensor) -> None:
        """Find the directions in the first rows that are compressed, if they are enough."""
        if not self.coef.length and self.own is None and coef_PNR.shape[1] >= self.least_tokens:
            [coef_NC] = coef_PNR
            initial = self.initial
            packing = {"plan": initial.quantization, "rank": initial.rank, "writer": initial.writer}
            self.own = OwnDirections.of_prompt(coef_NC, initial.shared.weight_C, self.count, **packing)

    def read_rows_of(self, other: "AdaptiveStore") -> None:
        super().read_rows_of(other)
        self.own = other.own

    def append(self, coef_PNR: Tensor) -> None:
        """Append rows, given by their coefficients of the shared basis, by which a token's class is told."""
        [coef_NC] = coef_PNR
        row_NR = coef_NC if self.own is None else self.own.encode(coef_NC, self.initial.shared, self.initial.rank)
        if isinstance(self.initial.quantization, TokenPlans):
            self._write(row_NR[None], class_N=self.initial.writer.classes(coef_NC))
        else:
            self._write(row_NR[None, :, : self.initial.rank])

    def operands(self) -> Operands:
        if self.own is None:
            return super().operands()
        decoder_1WR, prepared = self.initial.decoder_with(self.own, self.coef.dtype)
        return Operands(self.coef, decoder_1WR, self.full, prepared)

    def rebuilt(self, coef_PNR: Tensor) -> Tensor:
        if self.own is None:
            return super().rebuilt(coef_PNR)
        shared = self.initial.shared
        row_NR = self.own.encode(coef_PNR[0], shared, self.initial.rank)
        return self.states_of(row_NR[None], self.own.decoder(shared, self.initial.rank).mT[None])

    def forget_text(self) -> None:
        super().forget_text()
        self.own = None

    def tensors_by_kind(self, num_pinned: int) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors_by_kind(num_pinned)
        for tensor in () if self.own is None else self.own.tensors():
            yield BASES, tensor
