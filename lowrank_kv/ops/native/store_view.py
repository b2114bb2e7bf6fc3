"""A store as compiled code reads it and appends to it.

Shapes: P parts (1, or one for each KV head where heads are compressed apart), N tokens of a bucket, Y numbers or bytes of a
row.
"""

import ctypes
import struct
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowrank_kv.ops.native.library import CPU, CStruct, library
from lowrank_kv.stores.bit_plan import BitPlan, laid_out
from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.token_plans import MOST_CLASSES, TokenPlans
from lowrank_kv.stores.tokenwise import TokenwiseCoefficients

KINDS = {torch.float32: 0, torch.bfloat16: 1}
INTEGER_KINDS, PLANNED = {8: 2, 4: 3}, 4  # integers by their bits
# The members of `struct bucket` and `struct store` in store.h, in their order.
_BUCKET, _STORE, _CLASSES = struct.Struct("11q"), struct.Struct("4q2i4q"), struct.Struct("12q")
# Those of `struct plan` in plan.h, and what it says of coefficients that are read together.
_PLAN, _AT_ONCE, _AT_ONCE_NARROW = struct.Struct("13q"), 16, 64
_IN_TWO_REGISTERS, _IN_NEXT_TWO_REGISTERS, _ONE_BY_ONE = range(3)

_NARROW = 5  # bits of a coefficient that is read with many others

NOTHING = type(None), ()  # what a copy of addresses is: whoever has it must work out its own


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
        plan: "PackedPlan | None" = None,
        classes: "PackedClasses | None" = None,
        class_of_rows: tuple[Tensor, Tensor] | None = None,
    ):
        self.rank, self.kind, self.group_size, self.plan, self.classes = rank, kind, group_size, plan, classes
        self.slot_bytes = 0 if slot_N is None else slot_N.itemsize
        self._keepalive = rows_PNY, scale_PNS, slot_N, row_count, class_of_rows  # addresses in them follow
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
        return cls(
            byte_1NY,
            rank=coef.rank,
            row_count=coef.row_count,
            kind=PLANNED,
            classes=classes,
            class_of_rows=(coef.classes.buffer, coef.marks.buffer),
        )

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

    def append(self, coef_address: int, rank: int) -> bool:
        """Write a row of `rank` coefficients behind those of its rank; False, and nothing is written, if there is no room.
        Only where :func:`appends`, and buckets have one part and slots."""
        return bool(library().append(self.address, coef_address, rank))


class PackedPlan(CStruct):
    """A plan of bits as compiled code reads it."""

    def __init__(self, plan: BitPlan):
        table_L, firsts = _table_of(plan)
        # Lanes beyond the last coefficient read what is there, and are not written.
        spare = (0, _AT_ONCE + -plan.num_coefficients % _AT_ONCE)
        byte_R, shift_R, mask_R = (F.pad(each.cpu().int(), spare) for each in (plan.byte_R, plan.shift_R, plan.mask_R))
        first_R = [firsts.get(width, 0) for width in plan.bits]
        level_R = F.pad(torch.tensor(first_R, dtype=torch.int32, device=CPU), spare)
        blocks = range(plan.num_uncoded, plan.num_coefficients, _AT_ONCE)
        first_B = torch.tensor([int(byte_R[start]) for start in blocks], dtype=torch.int32, device=CPU)
        window_B = torch.zeros(len(blocks), _AT_ONCE, 4, dtype=torch.uint8, device=CPU)
        lookup_B = torch.empty(len(blocks), dtype=torch.uint8, device=CPU)
        for block, start in enumerate(blocks):
            end = min(start + _AT_ONCE, plan.num_coefficients)
            offset_A = (byte_R[start:end] - first_B[block]).to(torch.uint8)
            window_B[block, : end - start, 0], window_B[block, : end - start, 1] = offset_A, offset_A + 1
            lookup_B[block] = _lookup_of(set(plan.bits[start:end]))
        wide, *narrow = _narrow_lanes(plan)
        tensors = byte_R, shift_R, mask_R, level_R, table_L, first_B, window_B, lookup_B
        addresses, narrow_addresses = ([tensor.data_ptr() for tensor in each] for each in (tensors, narrow))
        super().__init__(
            _PLAN.pack(plan.num_uncoded, *addresses, wide, *narrow_addresses), keepalive=(*tensors, *narrow)
        )

    def __reduce__(self) -> tuple:
        return NOTHING


class PackedClasses(CStruct):
    """The plans of several classes, as compiled code reads them."""

    def __init__(self, token_plans: TokenPlans):
        plans = [packed_plan(plan) for plan in token_plans.plans]
        missing = [0] * (MOST_CLASSES - len(plans))
        ranks = [plan.num_coefficients for plan in token_plans.plans]
        memory = _CLASSES.pack(
            *(plan.address for plan in plans), *missing,
            *ranks, *missing,
            *token_plans.row_bytes(), *missing,
        )  # fmt: skip
        super().__init__(memory, keepalive=plans)

    def __reduce__(self) -> tuple:
        return NOTHING


def packed_plan(plan: BitPlan) -> PackedPlan:
    """What compiled code reads of a plan, made once."""
    if plan.native_view is None:
        plan.native_view = PackedPlan(plan)
    return plan.native_view


def _form_of(coef: Coefficients) -> dict[str, Any]:
    """How rows are stored, as arguments of a view."""
    quantization = coef.quantization
    if quantization is None:
        return {"kind": KINDS[coef.dtype]}
    if isinstance(quantization, BitPlan):
        return {"kind": PLANNED, "plan": packed_plan(quantization)}
    return {"kind": INTEGER_KINDS[quantization.bits], "group_size": quantization.group_size or 0}


def _table_of(plan: BitPlan) -> tuple[Tensor, dict[int, int]]:
    """All levels, and the place of each width's lowest: codebooks of up to 4 bits fill the first two registers, that of 5
    bits the next two, so that a lookup needs no memory."""
    table, firsts, place = torch.zeros(32 + 32 + 64 + 256, dtype=torch.float32, device=CPU), {}, 0
    for width in sorted(plan.levels):
        place = {5: 32, 6: 64, 8: 128}.get(width, place)
        firsts[width] = place
        table[place : place + 2**width] = plan.levels[width].cpu()
        place += 2**width
    return table, firsts


def _narrow_lanes(plan: BitPlan) -> tuple[int, Tensor, Tensor, Tensor]:
    """How coefficients of up to 5 bits are read, 64 at a time: see `struct plan` in plan.h for (wide, narrow_table,
    narrow_first, narrow)."""
    wide = sum(width > _NARROW for width in plan.bits)
    narrow = {width: level_L.cpu() for width, level_L in plan.levels.items() if width <= _NARROW}
    level_L, firsts = laid_out(narrow, CPU)
    table = F.pad(level_L, (0, 64 - len(level_L))).bfloat16()
    count = plan.num_coefficients - wide
    spare = -count % _AT_ONCE_NARROW

    def in_blocks(value_R: Tensor) -> Tensor:
        """Of each block eight times eight coefficients; those beyond the last are zero."""
        return F.pad(value_R, (0, spare)).view(-1, 8, 8)

    is_there = in_blocks(torch.ones(count, dtype=torch.bool, device=CPU))
    bit = in_blocks((plan.byte_R * 8 + plan.shift_R)[wide:].cpu())
    byte = bit[:, :, :1] // 8  # the first of those that hold eight codes
    first_B = byte[:, 0, 0]
    window = (byte - first_B[:, None, None] + torch.arange(8, device=CPU)) * is_there[:, :, :1]
    begin = (bit - 8 * byte) * is_there
    first_R = [firsts[width] for width in plan.bits[wide:]]
    level = in_blocks(torch.tensor(first_R, dtype=torch.int64, device=CPU))
    lanes = torch.stack([window, begin, in_blocks(plan.mask_R[wide:].cpu()), level], dim=1).to(torch.uint8)
    return wide, table, first_B.int(), lanes.contiguous()


def _lookup_of(widths: set[int]) -> int:
    """How neighbours of these widths find their levels in the table of :func:`_table_of`."""
    if widths == {5}:
        return _IN_NEXT_TWO_REGISTERS
    return _IN_TWO_REGISTERS if max(widths) < 5 else _ONE_BY_ONE
