"""A growing sequence of coefficient rows in which every row has its own length.

Shapes: N rows of one bucket, T rows of the sequence, C width, R rank of a bucket.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

# A full bucket grows by this share of its length: appends stay amortised O(1) and slack stays bounded.
GROWTH = 1 / 8


@dataclasses.dataclass
class _Bucket:
    """All rows of one rank, in order of position; the buffers may hold more rows than are used."""

    coef_NR: Tensor
    position_N: Tensor | None
    length: int = 0

    def reserve(self, rows: int, *, exact: bool) -> None:
        capacity = self.coef_NR.shape[0]
        if rows <= capacity and not (exact and rows < capacity):
            return
        size = rows if exact else max(rows, capacity + max(1, int(capacity * GROWTH)))
        self.coef_NR = _resized(self.coef_NR, size, self.length)
        if self.position_N is not None:
            self.position_N = _resized(self.position_N, size, self.length)


class RaggedStore:
    """One sequence's coefficients, row t keeping only its first r_t entries (DynaKV section 3.2, equation 2).

    Rows of equal rank lie together in a dense bucket, so that attention over them is a plain matrix product and no row
    is padded to the longest. A row's place in the sequence is stored beside it as int16, or int32 once the sequence is
    longer than int16 can count; a store that only ever sees one rank needs no such index and keeps none.

    Args:
        width: C, the most coefficients a row can have.
        dtype: of the coefficients.
        device: where they live.
        constant_rank: the rank of every row, when it is the same for all; None for ragged rows.
    """

    def __init__(self, width: int, *, dtype: torch.dtype, device: torch.device, constant_rank: int | None = None):
        self.width, self.dtype, self.device, self.constant_rank = width, dtype, device, constant_rank
        self.index_dtype = torch.int16
        self.length = 0
        self._buckets: dict[int, _Bucket] = {}

    def append(self, coef_TC: Tensor, rank_T: Tensor, *, exact: bool = False) -> None:
        """Add T rows at the end; only the first ``rank_T[t]`` entries of row t are read and kept.

        Args:
            coef_TC: coefficients, any floating dtype, converted to the store's.
            rank_T: integer ranks in 0..C.
            exact: allocate exactly what is used (for a whole prompt), not room to grow.
        """
        coef_TC = coef_TC.detach()
        count = coef_TC.shape[0]
        self._widen_index(self.length + count)
        if self.constant_rank is not None:
            self._append_rows(self.constant_rank, coef_TC[:, : self.constant_rank], None, exact)
        elif count == 1:
            position_N = torch.tensor([self.length], dtype=self.index_dtype, device=self.device)
            rank = int(rank_T)
            self._append_rows(rank, coef_TC[:, :rank], position_N, exact)
        else:
            ranks, group_T = torch.unique(rank_T, return_inverse=True)
            for group, rank in enumerate(ranks.tolist()):
                row_N = torch.nonzero(group_T == group).squeeze(1)
                position_N = (row_N + self.length).to(self.index_dtype)
                self._append_rows(rank, coef_TC[row_N, :rank], position_N, exact)
        self.length += count

    def buckets(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every non-empty bucket as (rank, coef_NR, position_N int64), in order of rank."""
        for rank in sorted(self._buckets):
            bucket = self._buckets[rank]
            if not bucket.length:
                continue
            if bucket.position_N is None:
                position_N = torch.arange(bucket.length, device=self.device)
            else:
                position_N = bucket.position_N[: bucket.length].long()
            yield rank, bucket.coef_NR[: bucket.length], position_N

    def dense(self) -> Tensor:
        """All rows as (T, C), zero beyond each row's rank."""
        coef_TC = torch.zeros(self.length, self.width, dtype=self.dtype, device=self.device)
        for rank, coef_NR, position_N in self.buckets():
            coef_TC[position_N, :rank] = coef_NR
        return coef_TC

    def ranks(self) -> Tensor:
        """The rank of every row, (T,) int64."""
        rank_T = torch.zeros(self.length, dtype=torch.long, device=self.device)
        for rank, _, position_N in self.buckets():
            rank_T[position_N] = rank
        return rank_T

    def crop(self, length: int) -> None:
        """Keep the first `length` rows. Buckets keep their buffers, so that a rolled-back draft costs no copy."""
        if not 0 <= length <= self.length:
            raise ValueError(f"`length` must be in 0..{self.length}, got {length}")
        for bucket in self._buckets.values():
            if bucket.position_N is None:
                bucket.length = min(bucket.length, length)
            else:
                # Positions rise within a bucket, so what goes is a suffix.
                bucket.length = int((bucket.position_N[: bucket.length] < length).sum())
        self.length = length

    def trim(self) -> None:
        """Give back all room to grow."""
        for bucket in self._buckets.values():
            bucket.reserve(bucket.length, exact=True)

    def clone(self) -> "RaggedStore":
        """An independent copy without room to grow."""
        copy = RaggedStore(self.width, dtype=self.dtype, device=self.device, constant_rank=self.constant_rank)
        copy.index_dtype, copy.length = self.index_dtype, self.length
        for rank, bucket in self._buckets.items():
            position_N = None if bucket.position_N is None else bucket.position_N[: bucket.length].clone()
            copy._buckets[rank] = _Bucket(bucket.coef_NR[: bucket.length].clone(), position_N, bucket.length)
        return copy

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held, whole, room to grow included."""
        for bucket in self._buckets.values():
            yield bucket.coef_NR
            if bucket.position_N is not None:
                yield bucket.position_N

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held, room to grow included."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def _append_rows(self, rank: int, coef_NR: Tensor, position_N: Tensor | None, exact: bool) -> None:
        bucket = self._buckets.get(rank)
        if bucket is None:
            empty_index = None if position_N is None else position_N[:0].clone()
            bucket = _Bucket(torch.empty(0, rank, dtype=self.dtype, device=self.device), empty_index)
            self._buckets[rank] = bucket
        end = bucket.length + coef_NR.shape[0]
        bucket.reserve(end, exact=exact)
        bucket.coef_NR[bucket.length : end] = coef_NR
        if position_N is not None:
            bucket.position_N[bucket.length : end] = position_N
        bucket.length = end

    def _widen_index(self, length: int) -> None:
        if self.index_dtype == torch.int16 and length > torch.iinfo(torch.int16).max:
            self.index_dtype = torch.int32
            for bucket in self._buckets.values():
                if bucket.position_N is not None:
                    bucket.position_N = bucket.position_N.to(torch.int32)


def _resized(tensor: Tensor, size: int, used: int) -> Tensor:
    resized = tensor.new_empty(size, *tensor.shape[1:])
    resized[:used] = tensor[:used]
    return resized
