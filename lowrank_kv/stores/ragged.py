"""A growing sequence of coefficient rows in which every row has its own length.

Shapes: N rows of one bucket, T rows of the sequence, C width, R rank of a bucket.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.memory_report import POSITIONS
from lowrank_kv.stores.quantization import Quantization

_INT16_MAX = torch.iinfo(torch.int16).max
# A long prompt's buckets have room for one row more in so many: the first tokens after it would else move one bucket each.
_PROMPT_ROWS_PER_SPARE = 64


@dataclasses.dataclass
class Bucket:
    """All rows of one rank, in order of position; changed by its own methods alone. The memo of `coef` is of both."""

    coef: Coefficients
    position_N: GrowingTensor

    def append(self, coef_NR: Tensor, position_N: Tensor) -> None:
        self.coef.append(coef_NR)
        self.position_N.append(position_N)

    def append_one(self, coef_1R: Tensor, position: int) -> None:
        self.coef.append(coef_1R)
        self.position_N.append_number(position)

    def count(self, length: int) -> None:
        """There are so many rows, the last of which have been written into the room to grow."""
        if length != self.coef.length:  # else what is known of them stays
            self.coef.count(length)
            self.position_N.count(length)

    def crop(self, count: int) -> None:
        """Keep the first `count` rows."""
        self.coef.crop(count)
        self.position_N.crop(count)

    def keep(self, row_N: Tensor, position_N: Tensor) -> None:
        """Keep the rows at `row_N`, which are then at `position_N`."""
        self.coef.keep(row_N)
        self.position_N = GrowingTensor(position_N)

    def reserve(self, capacity: int) -> None:
        """Have room for exactly so many rows, at least those in use."""
        self.coef.reserve(capacity)
        self.position_N.reserve(capacity)

    def widen_index(self, dtype: torch.dtype) -> None:
        self.coef.memo = None
        self.position_N.to(dtype)

    def clone(self) -> "Bucket":
        return Bucket(self.coef.clone(), self.position_N.clone())


class Reader(Protocol):
    """What has been worked out about all rows, by one who may write more into the room to grow."""

    def counts(self) -> list[int]:
        """The rows of each of :meth:`RaggedStore.filled`, those that have been written included."""


class RaggedStore:
    """One sequence's coefficients, row t keeping only its first r_t entries (DynaKV section 3.2, equation 2).

    Rows of equal rank lie together in a dense bucket, so that attention over them is a plain matrix product and no row
    is padded to the longest. A row's place in the sequence is stored beside it as int16, or int32 once the sequence is
    longer than int16 can count.

    Args:
        width: C, the most coefficients a row can have.
        dtype: of the coefficients.
        device: where they live.
        quantization: how they are held as integers; None to hold them in `dtype`.

    Attributes:
        length: T.
        memo: what a reader has worked out about all rows; forgotten when they change otherwise than by its writing. Those of
            the buckets outlive it: a new token changes one of many.
    """

    def __init__(
        self, width: int, *, dtype: torch.dtype, device: torch.device, quantization: Quantization | None = None
    ):
        self.width, self.dtype, self.device, self.quantization = width, dtype, device, quantization
        self.index_dtype = torch.int16
        self.length = 0
        self.memo: Reader | None = None
        self._buckets: dict[int, Bucket] = {}
        self._counted = 0  # rows that the buckets know of

    def append(self, coef_TC: Tensor, rank_T: Tensor, *, is_prompt: bool = False) -> None:
        """Add T rows at the end; only the first ``rank_T[t]`` entries of row t are read and kept.

        Args:
            coef_TC: coefficients, any floating dtype, converted to the store's.
            rank_T: integer ranks in 0..C.
            is_prompt: many rows, to which few will be added: they get less room to grow.
        """
        coef_TC = coef_TC.detach()
        count = coef_TC.shape[0]
        self._about_to_change(self.length + count)
        ranks, group_T = torch.unique(rank_T, return_inverse=True)
        for group, rank in enumerate(ranks.tolist()):
            row_N = torch.nonzero(group_T == group).squeeze(1)
            position_N = (row_N + self.length).to(self.index_dtype)
            bucket = self._bucket(rank)
            if is_prompt:
                used = bucket.coef.length + len(row_N)
                bucket.reserve(used + used // _PROMPT_ROWS_PER_SPARE)
            bucket.append(coef_TC[row_N, :rank], position_N)
        self.length = self._counted = self.length + count

    def append_one(self, coef_1R: Tensor) -> None:
        """Add one row at the end, all of whose entries are kept."""
        self._about_to_change(self.length + 1)
        self._bucket(coef_1R.shape[1]).append_one(coef_1R.detach(), self.length)
        self.length = self._counted = self.length + 1

    def count(self, rows: int) -> None:
        """The reader has written so many rows, and their places, behind those of their ranks. Called for every decoded token
        in every layer: buckets are told when they are next asked."""
        self.length += rows

    def filled(self) -> list["Bucket"]:
        """The buckets that hold rows, in order of rank."""
        self._settle()
        return self._filled()

    def buckets(self) -> list[Coefficients]:
        """The coefficients of :meth:`filled`, (N, R) each."""
        return [bucket.coef for bucket in self.filled()]

    def order(self) -> Tensor:
        """The places in the sequence of all rows of :meth:`filled`, one bucket after another, (T,) int64."""
        positions = [bucket.position_N.rows for bucket in self.filled()]
        return torch.cat(positions).long() if positions else torch.empty(0, dtype=torch.long, device=self.device)

    def dense(self) -> Tensor:
        """All rows as (T, C), zero beyond each row's rank."""
        coef_TC = torch.zeros(self.length, self.width, dtype=self.dtype, device=self.device)
        buckets = self.buckets()
        for coef, position_N in zip(buckets, self.order().split([c.length for c in buckets]), strict=True):
            coef_TC[position_N, : coef.rank] = coef.rows()
        return coef_TC

    def ranks(self) -> Tensor:
        """The rank of every row, (T,) int64."""
        rank_T = torch.zeros(self.length, dtype=torch.long, device=self.device)
        sizes = torch.tensor(
            [(coef.length, coef.rank) for coef in self.buckets()], dtype=torch.long, device=self.device
        )
        count_K, rank_K = sizes.view(-1, 2).T
        rank_T[self.order()] = rank_K.repeat_interleave(count_K)
        return rank_T

    def crop(self, length: int) -> None:
        """Keep the first `length` rows. Buckets keep their buffers, so that a rolled-back draft costs no copy."""
        if not 0 <= length <= self.length:
            raise ValueError(f"`length` must be in 0..{self.length}, got {length}")
        self._settle()
        self.memo = None
        for bucket in self._buckets.values():
            # Positions rise within a bucket, so what goes is a suffix.
            bucket.crop(int((bucket.position_N.rows < length).sum()))
        self.length = self._counted = length

    def keep(self, row_N: Tensor) -> None:
        """Keep the rows at `row_N`, which rise; they are then numbered anew from 0. No room to grow is left."""
        self._settle()
        self.memo = None
        new_T = torch.full((self.length,), -1, dtype=torch.long, device=self.device)
        new_T[row_N] = torch.arange(len(row_N), device=self.device)
        for bucket in self._buckets.values():
            new_N = new_T[bucket.position_N.rows.long()]
            stays_N = torch.nonzero(new_N >= 0).flatten()
            bucket.keep(stays_N, new_N[stays_N].to(self.index_dtype))
        self.length = self._counted = len(row_N)

    def clone(self) -> "RaggedStore":
        """An independent copy without room to grow."""
        copy = RaggedStore(self.width, dtype=self.dtype, device=self.device, quantization=self.quantization)
        self._settle()
        copy.index_dtype, copy.length, copy._counted = self.index_dtype, self.length, self.length
        for rank, bucket in self._buckets.items():
            copy._buckets[rank] = bucket.clone()
        return copy

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of everything held, whole, room to grow included."""
        for bucket in self._buckets.values():
            yield from bucket.coef.tensors_by_kind()
            yield POSITIONS, bucket.position_N.buffer

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held, room to grow included."""
        return sum(tensor.nbytes for _, tensor in self.tensors_by_kind())

    def _bucket(self, rank: int) -> Bucket:
        if rank not in self._buckets:
            coef = Coefficients((rank,), dtype=self.dtype, device=self.device, quantization=self.quantization)
            position_N = torch.empty(0, dtype=self.index_dtype, device=self.device)
            self._buckets[rank] = Bucket(coef, GrowingTensor(position_N))
        return self._buckets[rank]

    def _filled(self) -> list["Bucket"]:
        return [self._buckets[rank] for rank in sorted(self._buckets) if self._buckets[rank].coef.length]

    def _settle(self) -> None:
        """Tell the buckets of what the reader has written to them."""
        if self._counted != self.length:
            for bucket, count in zip(self._filled(), self.memo.counts(), strict=True):
                bucket.count(count)
            self._counted = self.length

    def __getstate__(self) -> dict[str, Any]:
        self._settle()  # a copy, or who loads it, makes a reader of its own
        return self.__dict__

    def _about_to_change(self, length: int) -> None:
        """There will be so many rows."""
        self._settle()
        self.memo = None
        if self.index_dtype == torch.int16 and length > _INT16_MAX:
            self.index_dtype = torch.int32
            for bucket in self._buckets.values():
                bucket.widen_index(torch.int32)
