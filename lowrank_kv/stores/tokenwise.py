"""Rows of coefficients of which each token has its own number of bytes, by its class.

Rows lie one after another, without gaps. A token's class takes two bits, and every 32nd row's first byte is noted, so that
any row is found by adding up the sizes of a few.

Shapes: N rows, C coefficients of a row that is written, R that are kept at most, K classes, Y bytes of all rows.
"""

import copy
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from lowrank_kv.stores.coefficients import TILE_ROWS, Coefficients
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.memory_report import COEFFICIENTS, SCALES
from lowrank_kv.stores.quantization import Quantization
from lowrank_kv.stores.rows_of_classes import CLASSES_PER_BYTE, ROWS_BETWEEN_MARKS, RowsOfClasses, unpacked_classes
from lowrank_kv.stores.token_plans import TokenPlans
from lowrank_kv.utils.errors import UserError

_MOST_BYTES = 2**31 - 1  # a mark is an int32


class TokenwiseCoefficients(Coefficients):
    """Rows of one part, packed by a plan for each class.

    Args:
        plans: what packs them.
        dtype: in which rows are read.

    Attributes:
        stored: the bytes of all rows.
        classes: of four rows to a byte, the first in its low bits.
        marks: the first byte of every 32nd row, int32.
        row_count: how many rows there are; compiled code reads this number where it lies.
        native_view: what compiled code has worked out about the buffers, and where these were.
    """

    def __init__(self, plans: TokenPlans, *, dtype: torch.dtype, device: torch.device):
        self.rank, self.dtype, self.quantization = plans.num_coefficients, dtype, plans

        def empty(kind: torch.dtype) -> GrowingTensor:
            return GrowingTensor(torch.empty(0, dtype=kind, device=device))

        self.stored, self.classes, self.marks = empty(torch.uint8), empty(torch.uint8), empty(torch.int32)
        self.row_count = ctypes.c_int64(0)
        self.native_view: Any = None

    @property
    def length(self) -> int:
        return self.row_count.value

    def is_whole(self) -> bool:
        """Whether the bytes are those of as many rows of these classes, and each mark is at its row, as in a file that
        nobody changed: compiled code reads where they say."""
        count, plans = self.length, self.quantization
        if count < 0 or len(self.classes.rows) != -(-count // CLASSES_PER_BYTE) or self.rank != plans.num_coefficients:
            return False
        class_N = self.class_of_rows()
        if bool((class_N >= len(plans.plans)).any()) or int(plans.size_K[class_N].sum()) != self.stored.length:
            return False
        return torch.equal(plans.starts(class_N)[::ROWS_BETWEEN_MARKS].to(torch.int32), self.marks.rows)

    # -- reading --------------------------------------------------------------------------------------------------

    def class_of_rows(self) -> Tensor:
        """The class of every row, (N,) int64."""
        return unpacked_classes(self.classes.rows, self.length)

    def rows(self, start: int = 0, end: int | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
        """Rows `start` to `end`, (1, N, R), zero where a token has no coefficient; see :meth:`Coefficients.rows`."""
        class_N = self.class_of_rows()
        places = slice(start, self.length if end is None else end)
        start_N = self.quantization.starts(class_N)[places]
        return self._decoded(start_N, class_N[places], dtype)[None]

    def _decoded(self, start_N: Tensor, class_N: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        dtype = self.dtype if dtype is None else dtype
        return _decoded(self.stored.rows, start_N, class_N, self.quantization, dtype)

    def buffers(self) -> tuple[Tensor, Tensor | None]:
        return self.stored.buffer, None

    def tiles(self, start: int = 0, end: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        end = self.length if end is None else end
        class_N = self.class_of_rows()
        start_N = self.quantization.starts(class_N)
        for first in range(start, end, TILE_ROWS):
            places = slice(first, min(first + TILE_ROWS, end))
            yield places, self._decoded(start_N[places], class_N[places])[None]

    # -- writing --------------------------------------------------------------------------------------------------

    def append(
        self, rows_1NC: Tensor, *, leaves_room: bool = True, writer: Any = None, class_N: Tensor | None = None
    ) -> None:
        """Add rows (1, N, C) at the end.

        Args:
            leaves_room, writer: see :meth:`Coefficients.append`.
            class_N: of the rows; by default as the plans' gate tells it from them, which takes all coefficients.
        """
        [row_NC] = rows_1NC
        if not len(row_NC):
            return
        writer = self.quantization if writer is None else writer
        class_N = writer.classes(row_NC) if class_N is None else class_N
        write = functools.partial(writer.write, row_NC, class_N)
        self._append(write, len(class_N), writer.nbytes_of(class_N), leaves_room=leaves_room)

    def _append(self, write: Callable[[RowsOfClasses], None], count: int, num_bytes: int, *, leaves_room: bool) -> None:
        """Add so many rows of so many bytes, which `write` writes."""
        rows, old_bytes = self.length, self.stored.length
        if old_bytes + num_bytes > _MOST_BYTES:
            raise UserError(
                f"the rows of one layer's keys, or values, of one sequence may take {_MOST_BYTES:,} bytes, and these would "
                f"take {old_bytes + num_bytes:,}; take a lower rate, or a preset without classes of tokens"
            )
        ends = old_bytes + num_bytes, -(-(rows + count) // CLASSES_PER_BYTE), -(-(rows + count) // ROWS_BETWEEN_MARKS)
        grown = self.stored, self.classes, self.marks
        lengths, buffers = [each.length for each in grown], [each.buffer for each in grown]
        try:
            for each, end in zip(grown, ends, strict=True):
                each.make_room(end - each.length, leaves_room=leaves_room)
            write(RowsOfClasses(*(each.buffer for each in grown), rows, old_bytes))
            for each, end in zip(grown, ends, strict=True):
                each.count_written(end - each.length)
            self.row_count.value += count
        except BaseException:  # an interrupt, too: later rows would be read at places of these
            for each, length in zip(grown, lengths, strict=True):
                each.crop(length)
            raise
        if any(each.buffer is not buffer for each, buffer in zip(grown, buffers, strict=True)):
            self.native_view = None  # it would keep the earlier buffers until the next token is decoded

    def reserve(self, capacity: int) -> None:
        """Not for rows of classes: how many bytes those to come will take is not known."""
        raise NotImplementedError("rows of classes have sizes once they are there")

    def _empty(self) -> Self:
        return type(self)(self.quantization, dtype=self.dtype, device=self.device)

    def keep(self, index_N: Tensor) -> None:
        """Keep the rows at `index_N`, (N,) or (1, N), in that order; no room to grow is left."""
        index_N = index_N.flatten()
        class_N = self.class_of_rows()
        start_N, kept_N = self.quantization.starts(class_N)[index_N], class_N[index_N]
        size_N, new_N = self.quantization.size_K[kept_N], self.quantization.starts(kept_N)
        # Byte y of the kept ones is byte y − new + start of the old ones.
        old_Y = (start_N - new_N).repeat_interleave(size_N) + torch.arange(int(size_N.sum()), device=self.device)
        kept = self._empty()
        byte_Y = self.stored.rows[old_Y]
        kept._append(lambda into: into.put(byte_Y, kept_N, new_N), len(kept_N), len(byte_Y), leaves_room=False)
        self.stored, self.classes, self.marks = kept.stored, kept.classes, kept.marks
        self.row_count, self.native_view = kept.row_count, None

    def kept(self, index_N: Tensor) -> Self:
        twin = copy.copy(self)
        twin.keep(index_N)
        return twin

    def crop(self, length: int) -> None:
        if length >= self.length:
            return
        class_N = self.class_of_rows()[:length]
        self.stored.crop(int(self.quantization.size_K[class_N].sum()))
        self.marks.crop(-(-length // ROWS_BETWEEN_MARKS))
        self.classes.crop(-(-length // CLASSES_PER_BYTE))  # beyond the rows in use a byte says nothing
        self.row_count.value = length

    def clone(self, rows: int | None = None) -> Self:
        if rows == 0:
            return self._empty()
        twin = copy.copy(self)
        twin.row_count, twin.native_view = ctypes.c_int64(self.length), None
        twin.stored, twin.classes, twin.marks = self.stored.clone(), self.classes.clone(), self.marks.clone()
        if rows is not None:
            twin.crop(rows)
            twin.stored, twin.classes, twin.marks = twin.stored.clone(), twin.classes.clone(), twin.marks.clone()
        return twin

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        yield COEFFICIENTS, self.stored.buffer
        yield SCALES, self.classes.buffer
        yield SCALES, self.marks.buffer


def rows_of_bytes(byte_Y: Tensor, class_M: Tensor, count: int, plans: TokenPlans) -> Tensor:
    """`count` rows (N, R) fp32 from their bytes and their packed classes."""
    class_N = unpacked_classes(class_M, count)
    return _decoded(byte_Y, plans.starts(class_N), class_N, plans, torch.float32)


def _decoded(byte_Y: Tensor, start_N: Tensor, class_N: Tensor, plans: TokenPlans, dtype: torch.dtype) -> Tensor:
    """The rows that begin at these bytes, (N, R), zero where a token has no coefficient."""
    row_NR = torch.zeros(len(class_N), plans.num_coefficients, dtype=dtype, device=byte_Y.device)
    for k, plan in enumerate(plans.plans):
        [place_M] = (class_N == k).nonzero(as_tuple=True)
        rank = plan.num_coefficients
        code_MY = byte_Y[start_N[place_M, None] + torch.arange(plan.row_bytes(rank), device=byte_Y.device)]
        row_NR[place_M, :rank] = plan.decode(code_MY, code_MY[:, :0], rank, dtype)
    return row_NR


def coefficients_of(
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | TokenPlans | None,
) -> Coefficients:
    """An empty store for rows of this shape."""
    if isinstance(quantization, TokenPlans):
        return TokenwiseCoefficients(quantization, dtype=dtype, device=device)
    return Coefficients(shape, dtype=dtype, device=device, quantization=quantization)
