"""Tensors that grow along one dimension with bounded room to spare."""

import copy
import ctypes
from typing import Any, Self

import torch
from torch import Tensor

# A full tensor grows by this share of its length, a long one by less, which bounds the spare room of long tensors: appends
# stay amortized O(1).
GROWTH = 1 / 8
_LONG_GROWTH, _LONG_ROWS = 1 / 64, 32


class GrowingRows:
    """Rows appended along `dim` of one or more tensors of otherwise fixed shapes, which have equally many rows.

    Args:
        start: the first rows of each tensor; the tensors are taken over, not copied.
        dim: the dimension that grows.

    Attributes:
        row_count: how many rows are in use. Compiled code reads this number where it lies, and may append rows by itself.
        native_view: what compiled code has worked out about the buffers; dropped when others take their place.
    """

    def __init__(self, *start: Tensor, dim: int = 0):
        self.dim = dim
        self.row_count = ctypes.c_int64(start[0].shape[dim])
        self.buffers = start

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The rows of each tensor and the room to grow."""
        return self._buffers

    @buffers.setter
    def buffers(self, buffers: tuple[Tensor, ...]) -> None:
        # Worked out here, where it is seldom needed, and not at every append.
        is_inference = any(buffer.is_inference() for buffer in buffers)
        self.native_view: Any = None  # before the buffers that it points to
        self._buffers, self._is_inference = buffers, is_inference

    @property
    def length(self) -> int:
        """Rows in use."""
        return self.row_count.value

    @property
    def capacity(self) -> int:
        return self._buffers[0].shape[self.dim]

    def is_whole(self) -> bool:
        """Whether there are as many rows as are counted, without room to grow, as in a file that nobody changed: compiled
        code reads what is counted."""
        return all(buffer.shape[self.dim] == self.length for buffer in self._buffers)

    def room_for(self, count: int, *, leaves_room: bool = True) -> list[Tensor]:
        """The next `count` rows of each tensor, to be written and then counted by :meth:`count_written`.

        Args:
            leaves_room: whether there is room to grow behind them; else exactly as many rows are allocated as are in use.
        """
        self.make_room(count, leaves_room=leaves_room)
        return [buffer.narrow(self.dim, self.length, count) for buffer in self._buffers]

    def make_room(self, count: int, *, leaves_room: bool = True) -> None:
        """Have room for the next `count` rows; the arguments are those of :meth:`room_for`."""
        end, capacity = self.row_count.value + count, self._buffers[0].shape[self.dim]
        if end > capacity or (end < capacity and not leaves_room):
            self.reserve(grown(capacity, end) if leaves_room else end)
        if self._is_inference and not torch.is_inference_mode_enabled():
            self.buffers = tuple(writable(buffer) for buffer in self._buffers)

    def count_written(self, count: int) -> None:
        """Add the rows that have been written to the room for them."""
        self.row_count.value += count

    def reserve(self, capacity: int) -> None:
        """Move to buffers of exactly `capacity` rows, at least those in use."""
        length = self.length
        capacity = max(capacity, length)
        if capacity == self.capacity:
            return
        moved = []
        for buffer in self._buffers:
            shape = list(buffer.shape)
            shape[self.dim] = capacity
            moved.append(buffer.new_empty(shape))
            moved[-1].narrow(self.dim, 0, length).copy_(buffer.narrow(self.dim, 0, length))
        self.buffers = tuple(moved)

    def crop(self, length: int) -> None:
        """Keep the first `length` rows; the buffers stay, so that a rolled-back draft costs no copy."""
        self.row_count.value = min(self.length, length)

    def keep(self, index_N: Tensor) -> None:
        """Keep the rows at `index_N`, in that order; no room to grow is left. (P, N) is an index for each leading part."""
        rows = [buffer.narrow(self.dim, 0, self.length) for buffer in self._buffers]
        if index_N.dim() == 1:
            self.buffers = tuple(each.index_select(self.dim, index_N) for each in rows)
        else:
            self.buffers = tuple(
                each.take_along_dim(index_N.view(*index_N.shape, *[1] * (each.dim() - 2)), dim=1) for each in rows
            )
        self.row_count.value = index_N.shape[-1]

    def sharing_buffers(self) -> Self:
        """The same rows, of which others can be cropped or appended to: only one of both may be appended to."""
        twin = copy.copy(self)
        twin.row_count, twin.native_view = ctypes.c_int64(self.length), None
        return twin

    def clone(self, rows: int | None = None) -> Self:
        """An independent copy of the first `rows` rows, or all, without room to grow."""
        rows = self.length if rows is None else rows
        twin = copy.copy(self)
        twin.row_count = ctypes.c_int64(rows)
        twin.buffers = tuple(
            buffer.narrow(self.dim, 0, rows).clone(memory_format=torch.contiguous_format) for buffer in self._buffers
        )
        return twin


class GrowingTensor(GrowingRows):
    """Rows of one tensor."""

    def __init__(self, start: Tensor, dim: int = 0):
        super().__init__(start, dim=dim)

    @property
    def buffer(self) -> Tensor:
        """The rows and the room to grow."""
        return self._buffers[0]

    @buffer.setter
    def buffer(self, buffer: Tensor) -> None:
        self.buffers = (buffer,)

    @property
    def rows(self) -> Tensor:
        """The rows in use, without the room to grow; a view."""
        return self._buffers[0].narrow(self.dim, 0, self.length)

    def append(self, rows: Tensor, *, leaves_room: bool = True) -> None:
        """Add rows at the end, converted to the tensor's dtype.

        Args:
            rows: any number along `dim`.
            leaves_room: whether there is room to grow behind them; else exactly as many rows are allocated as are in use.
        """
        count = rows.shape[self.dim]
        self.make_room(count, leaves_room=leaves_room)
        self._buffers[0].narrow(self.dim, self.row_count.value, count).copy_(rows)
        self.row_count.value += count

    def append_number(self, number: int) -> None:
        """Add one number at the end of a tensor of one dimension."""
        self.make_room(1)
        self._buffers[0][self.row_count.value] = number
        self.row_count.value += 1


def writable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it was made in inference mode and that mode is off: torch then forbids writing to it. A
    prompt may be read in that mode and the tokens after it without."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def grown(capacity: int, needed: int) -> int:
    """The capacity after a full tensor of `capacity` rows has grown, a few rows at a time, to hold `needed`."""
    while capacity < needed:
        more = min(int(capacity * GROWTH), _LONG_ROWS + int(capacity * _LONG_GROWTH))
        capacity = capacity + max(1, more) if capacity else needed
    return capacity
