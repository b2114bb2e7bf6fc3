"""Rows of coefficients that grow with the text, held in a floating dtype or as integers.

Shapes: N rows, R coefficients, M queries; leading dims (parts) are kept.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.memory_report import COEFFICIENTS, SCALES
from lowrank_kv.stores.quantization import SCALE_DTYPE, Quantization

# Rows are turned back into numbers so many at a time: a tile stays within the cores' caches, and the whole is never there.
TILE_ROWS = 2048


class Coefficients:
    """N rows of R coefficients.

    Args:
        shape: (…, R), the leading dims and the number of coefficients.
        dtype: of what is read, and of what is held unless quantized.
        quantization: how rows are held as integers; None to hold them as they are.

    Attributes:
        memo: whatever a reader has worked out about the rows; forgotten when they change.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
    ):
        *lead, self.rank = shape
        self.dtype, self.quantization = dtype, quantization
        self.memo: Any = None

        def empty(width: int, kind: torch.dtype) -> GrowingTensor:
            return GrowingTensor(torch.empty(*lead, 0, width, dtype=kind, device=device), dim=len(lead))

        self._values = (
            empty(quantization.row_bytes(self.rank), torch.uint8) if quantization else empty(self.rank, dtype)
        )
        self._scales = empty(2 * quantization.groups(self.rank), SCALE_DTYPE) if quantization else None

    @classmethod
    def of(cls, rows_NR: Tensor) -> "Coefficients":
        """Rows held as they are; the tensor is taken over, not copied."""
        *lead, _, rank = rows_NR.shape
        held = cls((*lead, rank), dtype=rows_NR.dtype, device=rows_NR.device)
        held._values = GrowingTensor(rows_NR, dim=len(lead))
        return held

    @property
    def length(self) -> int:
        return self._values.length

    @property
    def device(self) -> torch.device:
        return self._values.buffer.device

    # -- reading --------------------------------------------------------------------------------------------------

    def rows(self, start: int = 0, end: int | None = None) -> Tensor:
        """Rows `start` to `end`, (…, N, R); a view where they are held as they are."""
        count = (self.length if end is None else end) - start
        value_NY = self._values.buffer.narrow(self._values.dim, start, count)
        if self.quantization is None:
            return value_NY
        scale_NS = self._scales.buffer.narrow(self._scales.dim, start, count)
        return self.quantization.decode(value_NY, scale_NS, self.rank, self.dtype)

    def buffers(self) -> tuple[Tensor, Tensor | None]:
        """What is held of rows and, where they are integers, of their scales, room to grow included, contiguous: for
        compiled code."""
        return self._values.buffer, None if self._scales is None else self._scales.buffer

    def tiles(self, start: int = 0, end: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """The rows from `start` to `end`, or all, a tile at a time where they must be turned back into numbers."""
        end = self.length if end is None else end
        size = end if self.quantization is None else TILE_ROWS
        for first in range(start, end, max(size, 1)):
            last = min(first + size, end)
            yield slice(first, last), self.rows(first, last)

    def dot(self, query_MR: Tensor) -> Tensor:
        """Products of queries (…, M, R) with all rows, (…, M, N), in the queries' dtype."""
        products = [query_MR @ tile_NR.mT.to(query_MR.dtype) for _, tile_NR in self.tiles()]
        if len(products) == 1:
            return products[0]
        return torch.cat([query_MR.new_empty(*query_MR.shape[:-1], 0), *products], dim=-1)

    def weighted_sum(self, weight_MN: Tensor) -> Tensor:
        """Σ_n w_n c_n for weights (…, M, N), (…, M, R)."""
        if self.quantization is None:
            return weight_MN @ self.rows()
        total_MR = weight_MN.new_zeros(*weight_MN.shape[:-1], self.rank)
        for places, tile_NR in self.tiles():
            total_MR += weight_MN[..., places] @ tile_NR
        return total_MR

    # -- writing --------------------------------------------------------------------------------------------------

    def append(self, rows_NR: Tensor, *, exact: bool = False) -> None:
        """Add rows (…, N, R) at the end; with `exact` without room to grow."""
        self.memo = None
        if self.quantization is None:
            self._values.append(rows_NR, exact=exact)
        elif rows_NR.numel():
            codes, scales = self.quantization.encode(rows_NR)
            self._values.append(codes, exact=exact)
            self._scales.append(scales, exact=exact)
        else:  # no rows, or rows of no coefficients: there is nothing to round
            *lead, count, _ = rows_NR.shape
            for held in self._tensors():
                held.append(held.buffer.new_empty(*lead, count, held.buffer.shape[-1]), exact=exact)

    def count(self, length: int) -> None:
        """There are so many rows, the last of which have been written into the room to grow."""
        for held in self._changing():
            held.count(length)

    def empty_like(self, capacity: int) -> "Coefficients":
        """No rows yet, but room for `capacity` of them."""
        twin = self.clone(rows=0)
        for held in twin._tensors():
            held.reserve(capacity)
        return twin

    def reserve(self, capacity: int) -> None:
        """Move to buffers of exactly `capacity` rows, at least those in use."""
        for held in self._changing():
            held.reserve(capacity)

    def keep(self, index_N: Tensor) -> None:
        """Keep the rows at `index_N` (or, for each part its own, (P, N)), in that order; no room to grow is left."""
        for held in self._changing():
            held.keep(index_N)

    def crop(self, length: int) -> None:
        """Keep the first `length` rows; buffers stay."""
        for held in self._changing():
            held.crop(length)

    def clone(self, rows: int | None = None) -> "Coefficients":
        """An independent copy of the first `rows` rows, or all, without room to grow."""
        twin = object.__new__(Coefficients)
        twin.__dict__.update(self.__dict__)
        twin.memo = None
        twin._values = self._values.clone(rows)
        twin._scales = None if self._scales is None else self._scales.clone(rows)
        return twin

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of everything held, room to grow included."""
        yield COEFFICIENTS, self._values.buffer
        if self._scales is not None:
            yield SCALES, self._scales.buffer

    def _changing(self) -> list[GrowingTensor]:
        self.memo = None
        return self._tensors()

    def _tensors(self) -> list[GrowingTensor]:
        return [self._values] if self._scales is None else [self._values, self._scales]
