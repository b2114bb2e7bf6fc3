"""Rows of coefficients that grow with the text, stored in a floating dtype or quantized.

Shapes: N rows, R coefficients, M queries; leading dims (parts) are kept.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from lowrank_kv.stores.growable_tensor import GrowingRows
from lowrank_kv.stores.memory_report import COEFFICIENTS, SCALES
from lowrank_kv.stores.quantization import SCALE_DTYPE, Quantization

# Quantized rows are decoded this many at a time: a tile stays within the cores' caches, and all rows never exist at once.
TILE_ROWS = 2048


class Coefficients:
    """N rows of R coefficients.

    Args:
        shape: (…, R), the leading dims and the number of coefficients.
        dtype: in which rows are read, and stored unless quantized.
        quantization: how rows are stored in fewer bits; None to store them in `dtype`.

    Attributes:
        stored: the rows in use and the room to grow: (…, N, R), or codes (…, N, Y) and their scales.
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

        def empty(width: int, kind: torch.dtype) -> Tensor:
            return torch.empty(*lead, 0, width, dtype=kind, device=device)

        tensors = [empty(self.rank, dtype)]
        if quantization is not None:
            codes = empty(quantization.row_bytes(self.rank), torch.uint8)
            tensors = [codes, empty(quantization.scales_per_row(self.rank), SCALE_DTYPE)]
        self.stored = GrowingRows(*tensors, dim=len(lead))

    @classmethod
    def from_rows(cls, rows_NR: Tensor) -> Self:
        """Unquantized coefficients; the tensor (…, N, R) is taken over, not copied."""
        *lead, _, rank = rows_NR.shape
        coef = cls((*lead, rank), dtype=rows_NR.dtype, device=rows_NR.device)
        coef.stored = GrowingRows(rows_NR, dim=len(lead))
        return coef

    @property
    def length(self) -> int:
        return self.stored.length

    @property
    def device(self) -> torch.device:
        return self.stored.buffers[0].device

    def is_whole(self) -> bool:
        """Whether rows have the form that the settings say, as those of a file may not."""
        quantization, rank = self.quantization, self.rank
        expected = [(rank, self.dtype)]
        if quantization is not None:
            expected = [(quantization.row_bytes(rank), torch.uint8), (quantization.scales_per_row(rank), SCALE_DTYPE)]
        found = [(buffer.shape[-1], buffer.dtype) for buffer in self.stored.buffers[: len(expected)]]
        return found == expected and all(
            buffer.dim() == self.stored.dim + 2 for buffer in self.stored.buffers[: len(found)]
        )

    # -- reading --------------------------------------------------------------------------------------------------

    def rows(self, start: int = 0, end: int | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
        """Rows `start` to `end`, (…, N, R); a view unless they are quantized.

        Args:
            dtype: in which quantized rows are decoded; by default that of the coefficients.
        """
        count = (self.length if end is None else end) - start
        value_NY = self.stored.buffers[0].narrow(self.stored.dim, start, count)
        if self.quantization is None:
            return value_NY
        scale_NS = self.stored.buffers[1].narrow(self.stored.dim, start, count)
        return self.quantization.decode(value_NY, scale_NS, self.rank, self.dtype if dtype is None else dtype)

    def buffers(self) -> tuple[Tensor, Tensor | None]:
        """The stored rows and, where they are quantized, their scales, room to grow included, contiguous: for compiled
        code."""
        return self.stored.buffers[0], None if self.quantization is None else self.stored.buffers[1]

    def tiles(self, start: int = 0, end: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """The rows from `start` to `end`, or all, with their places; a tile at a time where they are quantized."""
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
        """Σ_n w_n c_n for weights (…, M, N), (…, M, R). Tiles are added in fp32 or better, as one product would add them."""
        if self.quantization is None:
            return weight_MN @ self.rows()
        dtype = torch.promote_types(weight_MN.dtype, torch.float32)
        total_MR = weight_MN.new_zeros(*weight_MN.shape[:-1], self.rank, dtype=dtype)
        for places, tile_NR in self.tiles():
            total_MR += weight_MN[..., places] @ tile_NR
        return total_MR.to(weight_MN.dtype)

    # -- writing --------------------------------------------------------------------------------------------------

    def append(self, rows_NR: Tensor, *, leaves_room: bool = True, writer: Any = None) -> None:
        """Add rows (…, N, R) at the end.

        Args:
            leaves_room: whether there is room to grow behind them.
            writer: encodes the rows in place of the quantization, as it does.
        """
        count = rows_NR.shape[-2]
        self._write(rows_NR, self.stored.room_for(count, leaves_room=leaves_room), writer)
        self.stored.count_written(count)

    def _write(self, rows_NR: Tensor, room: Sequence[Tensor], writer: Any = None) -> None:
        if self.quantization is None:
            room[0].copy_(rows_NR)
        elif rows_NR.numel():  # no rows, or rows of no coefficients, have nothing to round
            code_NY, scale_NS = (self.quantization if writer is None else writer).encode(rows_NR)
            room[0].copy_(code_NY)
            room[1].copy_(scale_NS)

    def reserve(self, capacity: int) -> None:
        """Move to buffers of exactly `capacity` rows, at least those in use."""
        self.stored.reserve(capacity)

    def keep(self, index_N: Tensor) -> None:
        """Keep the rows at `index_N` (or, for each part its own, (P, N)), in that order; no room to grow is left."""
        self.stored.keep(index_N)

    def kept(self, index_N: Tensor) -> Self:
        """What :meth:`keep` would leave; these rows stay as they are."""
        twin = copy.copy(self)
        twin.stored = self.stored.sharing_buffers()
        twin.keep(index_N)
        return twin

    def crop(self, length: int) -> None:
        """Keep the first `length` rows; buffers stay."""
        self.stored.crop(length)

    def clone(self, rows: int | None = None) -> Self:
        """An independent copy of the first `rows` rows, or all, without room to grow."""
        twin = copy.copy(self)
        twin.stored = self.stored.clone(rows)
        return twin

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of all buffers, room to grow included."""
        rows, scales = self.buffers()
        yield COEFFICIENTS, rows
        if scales is not None:
            yield SCALES, scales
