"""A growing sequence of coefficient rows in which every row has its own length.

Shapes: N rows of one bucket, T rows of the sequence, C width, R rank of a bucket.
"""

import copy
import ctypes
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor

from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.growable_tensor import GrowingRows
from lowrank_kv.stores.memory_report import POSITIONS
from lowrank_kv.stores.quantization import Quantization

_INT16_MAX = torch.iinfo(torch.int16).max
# After a long prompt each bucket has one spare row for every 64 in use: otherwise each of the first tokens after it would
# move a bucket.
_PROMPT_ROWS_PER_SPARE = 64


def position_nbytes(length: int) -> int:
    """Bytes in which a :class:`RaggedStore` keeps where each of its rows is in a sequence of this length."""
    return 2 if length <= _INT16_MAX else 4


class Bucket(Coefficients):
    """All rows of one rank, and their positions in the sequence, which rise.

    Args:
        rank: R.
        dtype, device, quantization: as :class:`RaggedStore` has them.
        index_dtype: of the positions.
    """

    def __init__(
        self,
        rank: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None,
        index_dtype: torch.dtype,
    ):
        super().__init__((rank,), dtype=dtype, device=device, quantization=quantization)
        self.stored = GrowingRows(*self.stored.buffers, torch.empty(0, dtype=index_dtype, device=device))

    def is_whole(self) -> bool:
        rises = bool((self.positions.diff() > 0).all())
        return super().is_whole() and self.position_buffer.dim() == 1 and self.stored.dim == 0 and rises

    @property
    def positions(self) -> Tensor:
        """Positions of the rows, (N,); a view."""
        return self.position_buffer[: self.length]

    @property
    def position_buffer(self) -> Tensor:
        """The positions and the room to grow."""
        return self.stored.buffers[-1]

    def append_at(self, coef_NR: Tensor, position_N: Tensor | int) -> None:
        """Add rows at the end, which are at these positions; one row's position may be an int."""
        *coef_room, position_room = self.stored.room_for(len(coef_NR))
        self._write(coef_NR, coef_room)
        position_room[:] = position_N
        self.stored.count_written(len(coef_NR))

    def replace_positions(self, position_N: Tensor) -> None:
        """Give the rows other positions, without room to grow, or store them in another dtype."""
        self.stored.buffers = (*self.stored.buffers[:-1], position_N)

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors_by_kind()
        yield POSITIONS, self.position_buffer


class RaggedStore:
    """One sequence's coefficients, row t keeping only its first r_t entries (DynaKV section 3.2, equation 2).

    Rows of equal rank lie together in a dense bucket, so that attention over them is a plain matrix product and no row
    is padded to the longest. A row's place in the sequence is stored beside it as int16, or int32 once the sequence is
    longer than int16 can count.

    Compiled code may append rows to buckets that have room. It raises the bucket's and the store's `row_count`, so that the
    store is complete as soon as compiled code returns.

    Args:
        width: C, the most coefficients a row can have.
        dtype: of the coefficients.
        device: where they live.
        quantization: how they are stored as integers; None to store them in `dtype`.

    Attributes:
        row_count: T, an int64 that compiled code reads and raises.
        native_view: what compiled code has worked out about all buckets; dropped when anybody else changes the store. Those
            of the buckets outlive it until their buffers move: a new token changes one of many.
    """

    def __init__(
        self, width: int, *, dtype: torch.dtype, device: torch.device, quantization: Quantization | None = None
    ):
        self.width, self.dtype, self.device, self.quantization = width, dtype, device, quantization
        self.index_dtype = torch.int16
        self.row_count = ctypes.c_int64(0)
        self.native_view: Any = None
        self._buckets: dict[int, Bucket] = {}

    @property
    def length(self) -> int:
        """T."""
        return self.row_count.value

    def is_whole(self) -> bool:
        """Whether each row of the sequence is in one bucket, as in a file that nobody changed."""
        fit = all(rank == bucket.rank <= self.width for rank, bucket in self._buckets.items())
        return fit and torch.equal(self.order().sort().values, torch.arange(self.length, device=self.device))

    def append(self, coef_TC: Tensor, rank_T: Tensor, *, is_prompt: bool = False) -> None:
        """Add T rows at the end; only the first ``rank_T[t]`` entries of row t are read and kept.

        Args:
            coef_TC: coefficients, any floating dtype, converted to the store's.
            rank_T: integer ranks in 0..C.
            is_prompt: whether these are many rows, to which few will be added: they get less room to grow.
        """
        coef_TC = coef_TC.detach()
        start, count = self.length, coef_TC.shape[0]
        self._prepare_append(count)
        ranks, bucket_T = torch.unique(rank_T, return_inverse=True)
        for i, rank in enumerate(ranks.tolist()):
            row_N = torch.nonzero(bucket_T == i).squeeze(1)
            position_N = (row_N + start).to(self.index_dtype)
            bucket = self._bucket(rank)
            if is_prompt:
                used = bucket.length + len(row_N)
                bucket.reserve(used + used // _PROMPT_ROWS_PER_SPARE)
            bucket.append_at(coef_TC[row_N, :rank], position_N)
        self.row_count.value = start + count

    def append_one(self, coef_1R: Tensor) -> None:
        """Add one row at the end, all of whose entries are kept."""
        self._prepare_append(1)
        self._bucket(coef_1R.shape[1]).append_at(coef_1R.detach(), self.length)
        self.row_count.value += 1

    def buckets(self) -> list[Bucket]:
        """The buckets that hold rows, in order of rank."""
        return [self._buckets[rank] for rank in sorted(self._buckets) if self._buckets[rank].length]

    def order(self) -> Tensor:
        """The positions in the sequence of all rows of :meth:`buckets`, one bucket after another, (T,) int64."""
        positions = [bucket.positions for bucket in self.buckets()]
        return torch.cat(positions).long() if positions else torch.empty(0, dtype=torch.long, device=self.device)

    def dense(self) -> Tensor:
        """All rows as (T, C), zero beyond each row's rank."""
        coef_TC = torch.zeros(self.length, self.width, dtype=self.dtype, device=self.device)
        for bucket in self.buckets():
            coef_TC[bucket.positions.long(), : bucket.rank] = bucket.rows()
        return coef_TC

    def ranks(self) -> Tensor:
        """The rank of every row, (T,) int64."""
        rank_T = torch.zeros(self.length, dtype=torch.long, device=self.device)
        for bucket in self.buckets():
            rank_T[bucket.positions.long()] = bucket.rank
        return rank_T

    def crop(self, length: int) -> None:
        """Keep the first `length` rows. Buckets keep their buffers, so that a rolled-back draft costs no copy."""
        if not 0 <= length <= self.length:
            raise ValueError(f"`length` must be in 0..{self.length}, got {length}")
        self.native_view = None
        for bucket in self._buckets.values():
            # Positions rise within a bucket, so the dropped rows are its last.
            bucket.crop(int((bucket.positions < length).sum()))
        self.row_count.value = length

    def kept(self, row_N: Tensor) -> Self:
        """A store of the rows at `row_N`, which rise; they are numbered anew from 0. No room to grow is left. This store
        stays as it is."""
        new_T = torch.full((self.length,), -1, dtype=torch.long, device=self.device)
        new_T[row_N] = torch.arange(len(row_N), device=self.device)
        twin = copy.copy(self)
        twin.row_count, twin.native_view, twin._buckets = ctypes.c_int64(len(row_N)), None, {}
        for rank, bucket in self._buckets.items():
            new_N = new_T[bucket.positions.long()]
            kept_N = torch.nonzero(new_N >= 0).flatten()
            twin._buckets[rank] = bucket.kept(kept_N)
            twin._buckets[rank].replace_positions(new_N[kept_N].to(self.index_dtype))
        return twin

    def clone(self) -> Self:
        """An independent copy without room to grow."""
        twin = copy.copy(self)
        twin.row_count = ctypes.c_int64(self.length)
        twin.native_view = None
        twin._buckets = {rank: bucket.clone() for rank, bucket in self._buckets.items()}
        return twin

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of all buffers, room to grow included."""
        for bucket in self._buckets.values():
            yield from bucket.tensors_by_kind()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, room to grow included."""
        return sum(tensor.nbytes for _, tensor in self.tensors_by_kind())

    def _bucket(self, rank: int) -> Bucket:
        if rank not in self._buckets:
            self._buckets[rank] = Bucket(
                rank,
                dtype=self.dtype,
                device=self.device,
                quantization=self.quantization,
                index_dtype=self.index_dtype,
            )
        return self._buckets[rank]

    def _prepare_append(self, count: int) -> None:
        """Drop the view and make positions wide enough for `count` more rows."""
        self.native_view = None
        if self.index_dtype.itemsize < position_nbytes(self.length + count):
            for bucket in self._buckets.values():
                bucket.replace_positions(bucket.position_buffer.to(torch.int32))
            self.index_dtype = torch.int32  # last: all buckets have it, or none is said to
