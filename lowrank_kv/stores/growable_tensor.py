"""A tensor that grows along one dimension with bounded room to spare."""

import torch
from torch import Tensor

# A full tensor grows by this share of its length, a long one by less, so that there is little room in all where there are
# many rows: appends stay amortized O(1) and slack stays bounded.
GROWTH = 1 / 8
_LONG_GROWTH, _LONG_ROWS = 1 / 64, 32


class GrowingTensor:
    """Rows appended along `dim` of an otherwise fixed shape.

    Args:
        start: the first rows; the tensor is taken over, not copied.
        dim: the dimension that grows.

    Attributes:
        length: rows in use.
        buffer: the rows and the room to grow.
        memo: whatever a reader has worked out about the buffer; forgotten when another takes its place.
    """

    def __init__(self, start: Tensor, dim: int = 0):
        self.dim, self.length = dim, start.shape[dim]
        self.buffer = start

    @property
    def buffer(self) -> Tensor:
        return self._buffer

    @buffer.setter
    def buffer(self, buffer: Tensor) -> None:
        self._buffer, self.memo = buffer, None

    @property
    def rows(self) -> Tensor:
        """What has been appended, without the room to grow; a view."""
        return self.buffer.narrow(self.dim, 0, self.length)

    @property
    def capacity(self) -> int:
        return self.buffer.shape[self.dim]

    def append(self, rows: Tensor, *, exact: bool = False) -> None:
        """Add rows at the end, converted to the tensor's dtype.

        Args:
            rows: any number along `dim`.
            exact: allocate exactly what is used, not room to grow.
        """
        count = rows.shape[self.dim]
        end = self.length + count
        if end > self.capacity or (exact and end < self.capacity):
            self.reserve(end if exact else grown(self.capacity, end))
        self._make_writable()
        self.buffer.narrow(self.dim, self.length, count).copy_(rows)
        self.length = end

    def append_number(self, number: int) -> None:
        """Add one number at the end of a tensor of one dimension."""
        if self.length == self.capacity:
            self.reserve(grown(self.capacity, self.length + 1))
        self._make_writable()
        self.buffer[self.length] = number
        self.length += 1

    def count(self, length: int) -> None:
        """There are so many rows, the last of which have been written into the room to grow."""
        self.length = length

    def _make_writable(self) -> None:
        buffer = writable(self.buffer)
        if buffer is not self.buffer:  # the memo is of the buffer
            self.buffer = buffer

    def reserve(self, capacity: int) -> None:
        """Move to a buffer of exactly `capacity` rows, at least those in use."""
        capacity = max(capacity, self.length)
        if capacity != self.capacity:
            shape = list(self.buffer.shape)
            shape[self.dim] = capacity
            buffer = self.buffer.new_empty(shape)
            buffer.narrow(self.dim, 0, self.length).copy_(self.rows)
            self.buffer = buffer

    def crop(self, length: int) -> None:
        """Keep the first `length` rows; the buffer stays, so that a rolled-back draft costs no copy."""
        self.length = min(self.length, length)

    def keep(self, index_N: Tensor) -> None:
        """Keep the rows at `index_N`, in that order; no room to grow is left. (P, N) is an index for each leading part."""
        if index_N.dim() == 1:
            self.buffer = self.rows.index_select(self.dim, index_N)
        else:
            self.buffer = self.rows.take_along_dim(index_N.view(*index_N.shape, *[1] * (self.rows.dim() - 2)), dim=1)
        self.length = index_N.shape[-1]

    def to(self, dtype: torch.dtype) -> None:
        """Convert what is held."""
        self.buffer = self.buffer.to(dtype)

    def clone(self, rows: int | None = None) -> "GrowingTensor":
        """An independent copy of the first `rows` rows, or all, without room to grow."""
        taken = self.rows if rows is None else self.rows.narrow(self.dim, 0, rows)
        return GrowingTensor(taken.clone(memory_format=torch.contiguous_format), self.dim)


def writable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it was made in inference mode, which torch lets nobody write to outside: a prompt may be
    read in that mode, and what follows without."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def grown(capacity: int, needed: int) -> int:
    """The capacity after a full tensor of `capacity` rows has grown, a few rows at a time, to hold `needed`."""
    while capacity < needed:
        more = min(int(capacity * GROWTH), _LONG_ROWS + int(capacity * _LONG_GROWTH))
        capacity = capacity + max(1, more) if capacity else needed
    return capacity
