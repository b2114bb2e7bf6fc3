"""Plans of bits as compiled code reads them: see `struct plan` in plan.h.

Shapes: R coefficients, L levels, B blocks of coefficients that are read together.
"""

import struct
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from lowrank_kv.ops.native.library import CPU, CStruct
from lowrank_kv.stores.bit_plan import BitPlan, laid_out
from lowrank_kv.stores.token_plans import MOST_CLASSES, TokenPlans

# The members of `struct plan` in plan.h and of `struct classes` in store.h, in their order.
_PLAN, _CLASSES = struct.Struct("14q"), struct.Struct("12q")
_AT_ONCE, _IN_BLOCK = 16, 64  # coefficients that are read together, as floats and as bf16
_IN_TWO_REGISTERS, _IN_NEXT_TWO_REGISTERS, _ONE_BY_ONE = range(3)
_KINDS_OF_BLOCKS = 5, 6, 8  # the most bits in each

_tables: WeakValueDictionary[bytes, Tensor] = WeakValueDictionary()  # by their bytes

NOTHING = type(None), ()  # what a copy of addresses is: whoever has it must work out its own


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
        tensors = byte_R, shift_R, mask_R, level_R, table_L, first_B, window_B, lookup_B
        blocks = _blocks_of(plan)
        addresses, of_blocks = ([tensor.data_ptr() for tensor in each] for each in (tensors, blocks))
        memory = _PLAN.pack(plan.num_uncoded, *addresses, len(blocks[0]), *of_blocks)
        super().__init__(memory, keepalive=(tensors, blocks))

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


def _lookup_of(widths: set[int]) -> int:
    """How neighbours of these widths find their levels in the table of :func:`_table_of`."""
    if widths == {5}:
        return _IN_NEXT_TWO_REGISTERS
    return _IN_TWO_REGISTERS if max(widths) < 5 else _ONE_BY_ONE


def _blocks_of(plan: BitPlan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How coefficients are read as bf16, 64 at a time: see `struct plan` in plan.h for (block_first, block_kind,
    block_lanes, block_levels)."""
    level_L, places, zero = _byte_levels_of(plan)
    uncoded = plan.num_uncoded

    def in_blocks(coded_R: Tensor, missing: int) -> Tensor:
        """(B, 64) of all coefficients, `missing` where they are uncoded and beyond the last."""
        spare = uncoded, -plan.num_coefficients % _IN_BLOCK
        return F.pad(coded_R[uncoded:].to(CPU, torch.int64), spare, value=missing).view(-1, _IN_BLOCK)

    width_R = torch.tensor(plan.bits, device=CPU)
    width, mask = in_blocks(width_R, 0), in_blocks(plan.mask_R, 0)
    place = in_blocks(torch.tensor([places.get(bits, 0) for bits in plan.bits], device=CPU), zero)
    bit = in_blocks(plan.byte_R * 8 + plan.shift_R, 8 * plan.row_bytes(plan.num_coefficients))
    first_B = bit.amin(dim=1) // 8
    lanes = []
    for order_64 in _orders():
        of_fours = bit[:, order_64].view(-1, 16, 4)
        is_there = width[:, order_64].view(-1, 16, 4) > 0
        byte = of_fours.amin(dim=2, keepdim=True) // 8  # the first of those that hold four codes
        window = (byte - first_B[:, None, None] + torch.arange(4, device=CPU)) * is_there.any(dim=2, keepdim=True)
        begin = (of_fours - 8 * byte + 32 * (torch.arange(16, device=CPU) % 2)[:, None]) * is_there
        of_lanes = [each.flatten(1) for each in (window, begin)]
        of_lanes += [each[:, order_64] for each in (mask, place, 255 * (width == 8))]
        lanes.append(torch.stack(of_lanes, dim=1))
    kind_B = torch.bucketize(width.amax(dim=1), torch.tensor(_KINDS_OF_BLOCKS, device=CPU))
    return first_B.int(), kind_B.to(torch.uint8), torch.stack(lanes).to(torch.uint8), level_L


def _byte_levels_of(plan: BitPlan) -> tuple[Tensor, dict[int, int], int]:
    """The low and then the high bytes of all levels of up to 6 bits in bf16, and the same of those of 8 bits; the place of
    each width's lowest; and that of a zero."""
    levels = {width: level_L.cpu() for width, level_L in plan.levels.items()}
    narrow_L, places = laid_out({width: each for width, each in levels.items() if width <= 5}, CPU)
    zeros = {width: torch.zeros(2**width, dtype=torch.float32, device=CPU) for width in (6, 8)}
    of_6_bits, of_8_bits = (levels.get(width, nothing) for width, nothing in zeros.items())
    up_to_6_bits = torch.cat([F.pad(narrow_L, (0, 64 - len(narrow_L))), of_6_bits])
    tables = [table_L.bfloat16().view(torch.uint8).view(-1, 2).T.flatten() for table_L in (up_to_6_bits, of_8_bits)]
    return _shared(torch.cat(tables)), places | {6: 64, 8: 0}, len(narrow_L) - 1


def _shared(table: Tensor) -> Tensor:
    """The same table for all plans that have equal ones, as those of a model's layers mostly have: it then stays in the
    processor's cache from layer to layer."""
    return _tables.setdefault(table.numpy().tobytes(), table)


def _orders() -> list[Tensor]:
    """Which coefficient of a block each lane of eight bits holds, in each `enum order` of plan.h, (64,).

    Lanes become words, those of the even eights and those of the odd ones each in their order; with another row's words
    beside each, the first fours of these and the second ones are in their order.
    """
    lane_64 = torch.arange(_IN_BLOCK, device=CPU)
    eight, four = lane_64 // 8, lane_64 // 4 % 2
    one_row = eight % 2 * 32 + eight // 2 * 8 + lane_64 % 8
    two_rows = eight % 2 * 32 + four * 16 + eight // 2 * 4 + lane_64 % 4
    return [one_row, two_rows]
