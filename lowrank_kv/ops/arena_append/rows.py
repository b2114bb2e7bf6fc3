"""Packing new rows into their pages, and copying exact states there, in Triton.

Rows that a plan of bits packs are :meth:`lowrank_kv.stores.bit_plan.BitPlan.encode`'s, others
:meth:`lowrank_kv.stores.ranked_rows.RankedRows.encode`'s.

Shapes: N new tokens of a program, R coefficients, Y bytes of a row, K groups of G coefficients that share a scale, or K
classes of plans, C joint width.
"""

import triton
import triton.language as tl

from lowrank_kv.ops.arena_append.places import page_and_row
from lowrank_kv.ops.triton.rounding import bf16_bits, integer_codes, integer_scales, nearest_integer


@triton.jit
def _copy_states(
    state_ptr,
    t_N,
    to_ptrs_N,
    sink_N,
    is_sink_N,
    state_stride_t,
    state_stride_g,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The exact states of tokens, all heads side by side, behind `to_ptrs_N`."""
    if tl.max(is_sink_N.to(tl.int32), 0) > 0:
        c = tl.arange(0, BLOCK_C)
        is_state_NC = is_sink_N[:, None] & (c < WIDTH)[None, :]
        state_ptrs = state_ptr + t_N[:, None] * state_stride_t
        state_ptrs += (c // HEAD_DIM * state_stride_g + c % HEAD_DIM)[None, :]
        to_ptrs = to_ptrs_N.to(tl.pointer_type(state_ptr.dtype.element_ty)) + sink_N * WIDTH
        tl.store(to_ptrs[:, None] + c[None, :], tl.load(state_ptrs, mask=is_state_NC), mask=is_state_NC)


@triton.jit
def _new_rows(
    page_ptr,
    slot_ptr,
    position_ptr,
    state_ptr,
    tokens,
    page_stride,
    state_stride_t,
    state_stride_g,
    sinks,
    BLOCK_SIZE: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program's new tokens, their rows, which of them have one, and their pages; the exact states of others are copied."""
    t_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    page_N, row_N = page_and_row(slot_ptr, position_ptr, t_N, t_N < tokens, BLOCK_SIZE, NUM_SINKS)
    is_row_N = (page_N >= 0) & (row_N >= 0)
    page_ptrs_N = page_ptr + page_N * page_stride
    if NUM_SINKS > 0:
        _copy_states(
            state_ptr,
            t_N,
            page_ptrs_N + sinks,
            row_N + NUM_SINKS,
            (page_N >= 0) & (row_N < 0),
            state_stride_t,
            state_stride_g,
            HEAD_DIM,
            WIDTH,
            BLOCK_C,
        )
    return t_N, row_N, is_row_N, page_ptrs_N


@triton.jit
def _codes(unit_NR, first_level_NR, mask_NR, is_coef_NR, threshold_ptr, WIDEST: tl.constexpr):
    """The numbers of the nearest levels, of two the lower, found bit by bit; or the bits of bf16 numbers."""
    is_coded_NR = is_coef_NR & (first_level_NR >= 0)
    code_NR = tl.zeros_like(mask_NR)
    for i in tl.static_range(WIDEST):
        bit = 1 << (WIDEST - 1 - i)
        is_tried_NR = is_coded_NR & (bit <= mask_NR)
        threshold_ptrs = threshold_ptr + first_level_NR + code_NR + (bit - 1)
        threshold_NR = tl.load(threshold_ptrs, mask=is_tried_NR, other=float("inf"))
        code_NR += tl.where(is_tried_NR & ((unit_NR <= threshold_NR) == 0), bit, 0)
    return tl.where(first_level_NR < 0, bf16_bits(unit_NR), code_NR)


@triton.jit(do_not_specialize=["tokens"])
def pack_planned(
    page_ptr,
    slot_ptr,
    position_ptr,
    coef_ptr,
    state_ptr,
    start_ptr,
    level_ptr,
    rank_ptr,
    size_ptr,
    descriptor_ptr,
    threshold_ptr,
    first_coef_ptr,
    code_ptr,
    tokens,
    page_stride,
    coef_stride,
    state_stride_t,
    state_stride_g,
    first_row,
    sinks,
    BLOCK_SIZE: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST_RANK: tl.constexpr,
    MOST_BYTES: tl.constexpr,
    WIDEST: tl.constexpr,
    MOST_IN_BYTE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows packed by the plan of their class.

    `rank_ptr` and `size_ptr` are the coefficients and bytes of a row of each class; `start_ptr` and `level_ptr` as
    :func:`.places.place_rows` writes them, None where all rows are of one class. `code_ptr` has room for all codes, (T,
    MOST_RANK) int16. The other tables are those of :class:`lowrank_kv.ops.arena_append.tables.PlannedTables`.
    """
    t_N, row_N, is_row_N, page_ptrs_N = _new_rows(
        page_ptr, slot_ptr, position_ptr, state_ptr, tokens, page_stride, state_stride_t, state_stride_g, sinks,
        BLOCK_SIZE, NUM_SINKS, HEAD_DIM, WIDTH, BLOCK_C, BLOCK_N,
    )  # fmt: skip
    if level_ptr is None:
        level_N = tl.zeros((BLOCK_N,), tl.int32)
        start_N = row_N * tl.load(size_ptr)
    else:
        level_N = tl.load(level_ptr + t_N, mask=is_row_N, other=0)
        start_N = tl.load(start_ptr + t_N, mask=is_row_N, other=0).to(tl.int64)
    rank_N = tl.load(rank_ptr + level_N)
    r = tl.arange(0, BLOCK_R)
    is_coef_NR = is_row_N[:, None] & (r[None, :] < rank_N[:, None])
    descriptor_ptrs_N = descriptor_ptr + level_N * (3 * MOST_RANK)
    mask_NR = tl.load(descriptor_ptrs_N[:, None] + (MOST_RANK + r)[None, :], mask=is_coef_NR, other=0)
    first_level_NR = tl.load(descriptor_ptrs_N[:, None] + (2 * MOST_RANK + r)[None, :], mask=is_coef_NR, other=0)
    coef_NR = tl.load(coef_ptr + t_N[:, None] * coef_stride + r[None, :], mask=is_coef_NR, other=0.0)

    wide_NR = coef_NR.to(tl.float64)
    size_N = tl.sqrt_rn((tl.sum(wide_NR * wide_NR, 1) / rank_N.to(tl.float64)).to(tl.float32))
    octaves_N = tl.log2(tl.where(size_N > 2.0**-16, size_N, 2.0**-16).to(tl.float64)).to(tl.float32)
    step_N = tl.minimum(tl.maximum(nearest_integer(octaves_N * 8), -128.0), 127.0)
    scale_N = tl.exp2(step_N.to(tl.float64) / 8).to(tl.float32)
    unit_NR = tl.div_rn(coef_NR, tl.broadcast_to(scale_N[:, None], (BLOCK_N, BLOCK_R)))
    code_NR = _codes(unit_NR, first_level_NR, mask_NR, is_coef_NR, threshold_ptr, WIDEST)
    code_ptrs_N = code_ptr + t_N * MOST_RANK
    tl.store(code_ptrs_N[:, None] + r[None, :], code_NR.to(tl.int16), mask=is_coef_NR)
    tl.debug_barrier()  # what other threads have stored is loaded below

    y = tl.arange(0, BLOCK_Y)
    is_byte_NY = is_row_N[:, None] & (y[None, :] < tl.load(size_ptr + level_N)[:, None])
    # No two codes share a bit, so that adding is setting.
    byte_NY = tl.where(y[None, :] == 0, step_N.to(tl.int32)[:, None] + 128, 0)
    first_ptrs_NY = first_coef_ptr + level_N[:, None] * MOST_BYTES + y[None, :]
    first_NY = tl.load(first_ptrs_NY, mask=is_byte_NY, other=MOST_RANK)
    for i in tl.static_range(MOST_IN_BYTE):
        r_NY = first_NY + i
        is_found_NY = r_NY < rank_N[:, None]
        bit_NY = tl.load(descriptor_ptrs_N[:, None] + r_NY, mask=is_found_NY, other=0) - 8 * y[None, :]
        is_found_NY = is_found_NY & (bit_NY < 8)
        code_NY = tl.load(code_ptrs_N[:, None] + r_NY, mask=is_found_NY, other=0).to(tl.int32) & 0xFFFF
        # Of a code that began in a byte before, the higher bits are here.
        part_NY = (code_NY << tl.minimum(tl.maximum(bit_NY, 0), 8)) >> tl.maximum(-bit_NY, 0)
        byte_NY += tl.where(is_found_NY, part_NY & 255, 0)
    row_ptrs_N = page_ptrs_N + first_row + start_N
    tl.store(row_ptrs_N[:, None] + y[None, :], byte_NY.to(tl.uint8), mask=is_byte_NY)


@triton.jit
def _pack_floats(coef_ptrs_N, row_ptrs_N, rank_N, is_row_N, IS_BF16: tl.constexpr, BLOCK_R: tl.constexpr):
    r = tl.arange(0, BLOCK_R)[None, :]
    is_coef_NR = is_row_N[:, None] & (r < rank_N[:, None])
    coef_NR = tl.load(coef_ptrs_N[:, None] + r, mask=is_coef_NR, other=0.0)
    if IS_BF16:
        row_ptrs = row_ptrs_N.to(tl.pointer_type(tl.int16))[:, None] + r
        tl.store(row_ptrs, bf16_bits(coef_NR).to(tl.int16), mask=is_coef_NR)
    else:
        tl.store(row_ptrs_N.to(tl.pointer_type(tl.float32))[:, None] + r, coef_NR, mask=is_coef_NR)


@triton.jit
def _codes_of(coef_ptrs_N, step_ptrs_N, groups_N, r_NY, is_coef_NY, BITS: tl.constexpr, GROUP: tl.constexpr):
    """The codes of coefficients, uint8; zero where there is none. Steps and least values are in their rows."""
    coef_NY = tl.load(coef_ptrs_N[:, None] + r_NY, mask=is_coef_NY, other=0.0)
    step_ptrs_NY = step_ptrs_N[:, None] + r_NY // GROUP
    step_NY = tl.load(step_ptrs_NY, mask=is_coef_NY, other=0).to(tl.int32) << 16
    least_NY = tl.load(step_ptrs_NY + groups_N[:, None], mask=is_coef_NY, other=0).to(tl.int32) << 16
    step_NY, least_NY = step_NY.to(tl.float32, bitcast=True), least_NY.to(tl.float32, bitcast=True)
    return tl.where(is_coef_NY, integer_codes(coef_NY, step_NY, least_NY, BITS), 0)


@triton.jit
def _pack_integers(
    coef_ptrs_N,
    row_ptrs_N,
    rank_N,
    is_row_N,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_Y: tl.constexpr,
):
    """Steps of all groups, their least values, and codes; with 4 bits the first half of a row's codes is in low bits."""
    k, g = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_G)
    r_KG = k[:, None] * GROUP + g[None, :]
    is_coef_NKG = is_row_N[:, None, None] & (g < GROUP)[None, None, :] & (r_KG[None, :, :] < rank_N[:, None, None])
    coef_NKG = tl.load(coef_ptrs_N[:, None, None] + r_KG[None, :, :], mask=is_coef_NKG, other=0.0)
    groups_N = tl.cdiv(rank_N, GROUP)
    is_group_NK = is_row_N[:, None] & (k[None, :] < groups_N[:, None])
    low_NK = tl.where(is_group_NK, tl.min(tl.where(is_coef_NKG, coef_NKG, float("inf")), 2), 0.0)
    high_NK = tl.where(is_group_NK, tl.max(tl.where(is_coef_NKG, coef_NKG, float("-inf")), 2), 0.0)
    step_NK, least_NK = integer_scales(low_NK, high_NK, BITS)
    step_ptrs_N = row_ptrs_N.to(tl.pointer_type(tl.int16))
    step_ptrs_NK = step_ptrs_N[:, None] + k[None, :]
    tl.store(step_ptrs_NK, bf16_bits(step_NK).to(tl.int16), mask=is_group_NK)
    tl.store(step_ptrs_NK + groups_N[:, None], bf16_bits(least_NK).to(tl.int16), mask=is_group_NK)
    tl.debug_barrier()  # what other threads have stored is loaded below

    codes_N = rank_N if BITS == 8 else (rank_N + 1) // 2
    y_NY = tl.broadcast_to(tl.arange(0, BLOCK_Y)[None, :], (is_row_N.shape[0], BLOCK_Y))
    is_low_NY = is_row_N[:, None] & (y_NY < codes_N[:, None])
    byte_NY = _codes_of(coef_ptrs_N, step_ptrs_N, groups_N, y_NY, is_low_NY, BITS, GROUP)
    if BITS == 4:
        high_NY = y_NY + codes_N[:, None]
        is_high_NY = is_low_NY & (high_NY < rank_N[:, None])
        byte_NY |= _codes_of(coef_ptrs_N, step_ptrs_N, groups_N, high_NY, is_high_NY, BITS, GROUP) << 4
    # Rows have an even number of bytes.
    is_byte_NY = is_row_N[:, None] & (y_NY < (codes_N + codes_N % 2)[:, None])
    tl.store((row_ptrs_N + 4 * groups_N)[:, None] + y_NY, byte_NY, mask=is_byte_NY)


@triton.jit(do_not_specialize=["tokens"])
def pack_ranked(
    page_ptr,
    slot_ptr,
    position_ptr,
    coef_ptr,
    state_ptr,
    start_ptr,
    level_ptr,
    tokens,
    page_stride,
    coef_stride,
    state_stride_t,
    state_stride_g,
    first_row,
    sinks,
    row_bytes,
    BLOCK_SIZE: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows of floats of 32 or 16 bits, or of integers of 8 or 4.

    `start_ptr` and `level_ptr` as :func:`.places.place_rows` writes them, None where all rows have `RANK` coefficients and
    `row_bytes` bytes.
    """
    t_N, row_N, is_row_N, page_ptrs_N = _new_rows(
        page_ptr, slot_ptr, position_ptr, state_ptr, tokens, page_stride, state_stride_t, state_stride_g, sinks,
        BLOCK_SIZE, NUM_SINKS, HEAD_DIM, WIDTH, BLOCK_C, BLOCK_N,
    )  # fmt: skip
    if level_ptr is None:
        rank_N = tl.full((BLOCK_N,), RANK, tl.int32)
        start_N = row_N * row_bytes
    else:
        rank_N = tl.load(level_ptr + t_N, mask=is_row_N, other=1)
        start_N = tl.load(start_ptr + t_N, mask=is_row_N, other=0).to(tl.int64)
    row_ptrs_N = page_ptrs_N + first_row + start_N
    coef_ptrs_N = coef_ptr + t_N * coef_stride
    if BITS >= 16:
        _pack_floats(coef_ptrs_N, row_ptrs_N, rank_N, is_row_N, BITS == 16, BLOCK_R)
    else:
        _pack_integers(coef_ptrs_N, row_ptrs_N, rank_N, is_row_N, BITS, GROUP, BLOCK_K, BLOCK_G, BLOCK_R)
