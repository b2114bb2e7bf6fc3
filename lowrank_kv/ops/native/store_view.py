"""A store as compiled code reads it and appends to it.

Shapes: P parts (1, or one for each KV head where heads are compressed apart), N tokens of a bucket, Y numbers or bytes of a
row.
"""

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor

from lowrank_kv.ops.native.library import library
from lowrank_kv.ops.native.packed_plan import NOTHING, PackedClasses, PackedPlan, packed_plan
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.tokenwise import TokenwiseCoefficients

KINDS = {torch.float32: 0, torch.bfloat16: 1}
INTEGER_KINDS, PLANNED = {8: 2, 4: 3}, 4  # integers by their bits
# The members of `struct bucket` and `struct store` in store.h, in their order.
_BUCKET, _STORE = struct.Struct("11q"), struct.Struct("4q2i4q")


class RankBucketView:
    """Tokens of one rank; the tensors must not move while this is in use.

    Args:
        rows_PNY: their coefficients, (N, Y) or (P, N, Y), contiguous, with room to grow after each part's rows.
        rank: R, which is Y unless the rows are integers.
        row_count: N, an int64 that compiled code reads when it is called.
        scale_PNS: of integers.
        slot_N: where each is in the order that the mask's columns and places have, rising; contiguous, with room to grow.
            None where token n is at n.
        kind: of the rows, as in `store.h`.
        group_size: of integers: coefficients that share a scale; 0 when all of a row do.
        plan: of rows that are packed by one.
        classes: of rows that are packed by one of several.
        class_of_rows: with `classes`, the packed class of each row, and the first byte of every 32nd row.

    Attributes:
        buffers: of rows of several classes: what was read of them, their classes and marks.
    """

    def __init__(
        self,
        rows_PNY: Tensor,
        *,
        rank: int,
        row_count: ctypes.c_int64,
        scale_PNS: Tensor | None = None,
        slot_N: Tensor | None = None,
        kind: int,
        group_size: int = 0,
        plan: PackedPlan | None = None,
        classes: PackedClasses | None = None,
        class_of_rows: tuple[Tensor, Tensor] | None = None,
    ):
        self.rank, self.kind, self.group_size, self.plan, self.classes = rank, kind, group_size, plan, classes
        self.slot_bytes = 0 if slot_N is None else slot_N.itemsize
        self._keepalive = rows_PNY, scale_PNS, slot_N, row_count, class_of_rows  # addresses in them follow
        self.buffers: tuple[Tensor, ...] = ()
        self.members = _BUCKET.pack(
            rows_PNY.data_ptr(),
            0 if scale_PNS is None else scale_PNS.data_ptr(),
            0 if slot_N is None else slot_N.data_ptr(),
            ctypes.addressof(row_count),
            rows_PNY.shape[-2],
            rank,
            rows_PNY.shape[-1] * rows_PNY.itemsize,
            rows_PNY.stride(0) * rows_PNY.itemsize,
            0 if scale_PNS is None else scale_PNS.stride(0) * scale_PNS.itemsize,
            *([0, 0] if class_of_rows is None else (tensor.data_ptr() for tensor in class_of_rows)),
        )

    def __reduce__(self) -> tuple:
        return NOTHING

    @classmethod
    def from_coefficients(cls, coef: Coefficients, slot_N: Tensor | None = None) -> "RankBucketView":
        """Coefficients of one rank; `slot_N` as above."""
        rows_PNY, scale_PNS = coef.buffers()
        return cls(
            rows_PNY,
            rank=coef.rank,
            row_count=coef.stored.row_count,
            scale_PNS=scale_PNS,
            slot_N=slot_N,
            **_form_of(coef),
        )

    @classmethod
    def from_tokenwise(cls, coef: TokenwiseCoefficients) -> "RankBucketView":
        """Rows of several classes."""
        classes = PackedClasses(coef.quantization)
        mean_bytes = round(coef.quantization.nbytes(coef.rank))  # only for how many are read ahead
        byte_1NY = coef.stored.buffer[: coef.length * mean_bytes].view(1, -1, 1).expand(1, -1, mean_bytes)
        found = cls(
            byte_1NY,
            rank=coef.rank,
            row_count=coef.row_count,
            kind=PLANNED,
            classes=classes,
            class_of_rows=(coef.classes.buffer, coef.marks.buffer),
        )
        found.buffers = coef.stored.buffer, coef.classes.buffer, coef.marks.buffer
        return found

    @classmethod
    def from_full_rank(cls, states_GTD: GrowingTensor) -> "RankBucketView":
        """Keys, or values, at full rank, (G, N, D), contiguous."""
        buffer = states_GTD.buffer
        return cls(buffer, rank=buffer.shape[2], row_count=states_GTD.row_count, kind=KINDS[buffer.dtype])


def appends(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether compiled code can append rows that are held in `dtype`, not as integers."""
    return dtype == torch.float32 and device.type == "cpu" and library() is not None


class StoreView:
    """The buckets of one store, all in one form and in order of rank.

    Args:
        buckets: those that have rows; none where nothing is appended and attended over.
        rank: the largest of the buckets, or more; with several parts as many as the decoder of each has rows.
        row_count: rows of all buckets, an int64 that compiled code raises when it appends; None where it never does.
    """

    def __init__(self, buckets: list[RankBucketView], rank: int, row_count: ctypes.c_int64 | None = None):
        first = (0, 0, 0, 0, 0, 0)
        if buckets:
            addresses = (0 if each is None else each.address for each in (buckets[0].plan, buckets[0].classes))
            first = buckets[0].kind, buckets[0].slot_bytes, buckets[0].group_size, *addresses, 0
        self._keepalive = buckets, row_count  # addresses in them follow
        self._memory = ctypes.create_string_buffer(_STORE.size + len(buckets) * _BUCKET.size)
        self.address = ctypes.addressof(self._memory)
        count_address = 0 if row_count is None else ctypes.addressof(row_count)
        store = _STORE.pack(self.address + _STORE.size, len(buckets), count_address, rank, *first)
        self._memory.raw = b"".join([store, *(bucket.members for bucket in buckets)])

    def __reduce__(self) -> tuple:
        return NOTHING

    def reads(self, rows: Tensor, classes: Tensor, marks: Tensor) -> bool:
        """Whether the first bucket's rows of several classes are in these very buffers."""
        found = self._keepalive[0][0].buffers
        return found[0] is rows and found[1] is classes and found[2] is marks

    def append(self, coef_address: int, rank: int) -> bool:
        """Write a row of `rank` coefficients behind those of its rank; False, and nothing is written, if there is no room.
        Only where :func:`appends`, and buckets have one part and slots."""
        return bool(library().append(self.address, coef_address, rank))


def _form_of(coef: Coefficients) -> dict[str, Any]:
    """How rows are stored, as arguments of a view."""
    quantization = coef.quantization
    if quantization is None:
        return {"kind": KINDS[coef.dtype]}
    if isinstance(quantization, BitPlan):
        return {"kind": PLANNED, "plan": packed_plan(quantization)}
    return {"kind": INTEGER_KINDS[quantization.bits], "group_size": quantization.group_size or 0}
