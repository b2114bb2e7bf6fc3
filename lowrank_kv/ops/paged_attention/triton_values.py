"""Paged values times the softmax of scores: Σ_t w_t c_t, split over the sequence, never rebuilt.

A program has one granule of coefficients and every S-th tile, of which it reads those that have the granule. Each keeps
its own running maximum; the first granule's programs see every token and keep the sum of weights.

Shapes: B batch, P rows of queries, T capacity, N tokens of a tile, K granules of the width C, S splits, I tiles looked up
at once, X parts of the whole softmax.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_kv.ops.paged_attention.triton_pages import load_codes
from lowrank_kv.ops.triton.integer_rows import weigh_rows, weigh_scales
from lowrank_kv.ops.triton.launch import block, computing_type, online_softmax_step, splits_of, tuned
from lowrank_kv.ops.triton.scores_by_position import load_scores
from lowrank_kv.stores.paged import PagedStore

_MAX_BLOCK_ROWS = 64
# Tiles whose table entries a program holds at once: as many as a warp has threads, so that one instruction finds one.
_BLOCK_TILES = 32
_NO_PAGE = tl.constexpr(-1)
# Programs for each multiprocessor, more than it runs at once: most granules' have no tile and end at once.
_PROGRAMS = 16


@tuned(
    # Positions, scores and sums are stages apart: five keep two tiles' scores and coefficients under way, seven three.
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=5),
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=7),
    triton.Config({"BLOCK_N": 32}, num_warps=2, num_stages=5),
    triton.Config({"BLOCK_N": 32}, num_warps=2, num_stages=7),
    key=["room_class", "TOKENS", "BLOCK_P", "ROW_BLOCKS", "PAGE_WIDTH", "BITS"],
)
@triton.jit(do_not_specialize=["splits", "parts"])
def _weighted_latents(
    score_ptr,
    page_ptr,
    tile_page_ptr,
    tile_granules_ptr,
    tile_rows_ptr,
    position_ptr,
    scale_ptr,
    tiles_ptr,
    partial_ptr,
    max_ptr,
    sum_ptr,
    room_class,
    slots,
    capacity,
    splits,
    parts,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE_WIDTH: tl.constexpr,
    GRANULES: tl.constexpr,
    BITS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    split, granule = tl.program_id(0), tl.program_id(2)
    b = (tl.program_id(1) // ROW_BLOCKS).to(tl.int64)
    p = (tl.program_id(1) % ROW_BLOCKS) * BLOCK_P + tl.arange(0, BLOCK_P)
    # A tile in pieces of at most BLOCK_N tokens: of integers a whole one would spill registers.
    size: tl.constexpr = BLOCK_N if BLOCK_N < TOKENS else TOKENS
    pieces: tl.constexpr = TOKENS // size
    is_row_P = p < P
    tiles = tl.load(tiles_ptr + b)
    max_P = tl.full((BLOCK_P,), float("-inf"), tl.float32)
    sum_P = tl.zeros((BLOCK_P,), tl.float32)
    least_P = tl.zeros((BLOCK_P,), tl.float32)
    total_PY = tl.zeros((BLOCK_P, PAGE_WIDTH), tl.float32)
    high_PY = tl.zeros((BLOCK_P, PAGE_WIDTH if BITS == 4 else 1), tl.float32)
    # Every S-th tile, because tiles of a prompt are sorted by rank: a run of them would have all of a granule or nothing.
    for first in range(split, tiles, splits * BLOCK_I):
        slot_I = first + tl.arange(0, BLOCK_I) * splits
        is_tile_I = slot_I < tiles
        tile_I = b * slots + slot_I
        has_page_I = tl.load(tile_granules_ptr + tile_I, mask=is_tile_I, other=0) > granule
        rows_I = tl.load(tile_rows_ptr + tile_I, mask=is_tile_I, other=0)
        page_I = tl.load(tile_page_ptr + tile_I * GRANULES + granule, mask=has_page_I, other=_NO_PAGE)
        is_own_I = has_page_I | (is_tile_I & (granule == 0))
        # All that a piece's reads begin with is in registers, and none is passed over, so that the loop reads ahead.
        order_I = tl.where(is_own_I, tl.cumsum(is_own_I.to(tl.int32), 0) - 1, BLOCK_I)
        for piece in range(tl.sum(is_own_I.to(tl.int32), 0) * pieces):
            is_it_I = order_I == piece // pieces
            tile = b * slots + tl.sum(tl.where(is_it_I, slot_I, 0), 0)
            page = tl.sum(tl.where(is_it_I, page_I, 0), 0)
            n = (piece % pieces) * size + tl.arange(0, size)
            is_row_N = n < tl.sum(tl.where(is_it_I, rows_I, 0), 0)
            token_N = tl.load(position_ptr + tile * TOKENS + n, mask=is_row_N, other=0)
            score_PN = load_scores(score_ptr, token_N, is_row_N, p, is_row_P, b, capacity, P)
            weight_PN, rescale_P, max_P, sum_P = online_softmax_step(score_PN, max_P, sum_P)

            is_coef_N = is_row_N & (page != _NO_PAGE)
            if BITS < 16:
                scale_ptrs = scale_ptr + (tile * TOKENS + n) * 2
                weight_PN, least_P = weigh_scales(weight_PN, rescale_P, least_P, scale_ptrs, is_coef_N)
            weight_PN = weight_PN.to(COMPUTE)
            # Whole bytes, also where two codes share one.
            row_NY = load_codes(page_ptr, page, 0, n, is_coef_N, TOKENS, PAGE_WIDTH, 8 if BITS == 4 else BITS)
            total_PY, high_PY = weigh_rows(weight_PN, rescale_P, total_PY, high_PY, row_NY, BITS)

    halves: tl.constexpr = 2 if BITS == 4 else 1
    width: tl.constexpr = GRANULES * halves * PAGE_WIDTH
    row = b * P + p
    column_Y = granule * halves * PAGE_WIDTH + tl.arange(0, PAGE_WIDTH)
    partial_ptrs = partial_ptr + (row * splits + split)[:, None] * width + column_Y[None, :]
    # Most tokens have few granules: the sums of the others are neither written nor read.
    is_sum_P = is_row_P & (max_P > float("-inf"))
    tl.store(partial_ptrs, total_PY + least_P[:, None], mask=is_sum_P[:, None])
    if BITS == 4:
        tl.store(partial_ptrs + PAGE_WIDTH, high_PY + least_P[:, None], mask=is_sum_P[:, None])
    part = row * parts + split
    tl.store(max_ptr + part * GRANULES + granule, max_P, mask=is_row_P)
    if granule == 0:
        tl.store(sum_ptr + part, sum_P, mask=is_row_P)


def value_splits(values: PagedStore, device: torch.device) -> int:
    """S, parts to cut the tiles of each sequence into."""
    return splits_of(values.slots, values.batch * values.granules, device, programs=_PROGRAMS)


def weighted_latents(
    score_BTP: Tensor, values: PagedStore, max_BPXK: Tensor, sum_BPX: Tensor, *, splits: int, dtype: torch.dtype
) -> Tensor:
    """The sums of weighted coefficients of S splits, (B, P, S, C) fp32, each granule relative to its own maximum.

    Undefined where that is -inf: the split has no tile with the granule, or only masked tokens.

    Args:
        score_BTP: fp32 scores times log2 e by position.
        max_BPXK, sum_BPX: where maxima and sums of weights are written, fp32, to the first S of X parts.
        dtype: in which weights and coefficients are multiplied.
    """
    batch, _, rows = score_BTP.shape
    pool = values.pool
    partial_BPSC = torch.empty(batch, rows, splits, values.width, dtype=torch.float32, device=score_BTP.device)
    block_rows = min(_MAX_BLOCK_ROWS, block(rows))
    row_blocks = triton.cdiv(rows, block_rows)
    _weighted_latents[splits, batch * row_blocks, values.granules](
        score_BTP,
        pool.page_PNY,
        values.tile_page_BSK,
        values.tile_granules_BS,
        values.tile_rows_BS,
        values.tile_position_BSN,
        values.tile_scale_BSN2,
        values.tiles_B,
        partial_BPSC,
        max_BPXK,
        sum_BPX,
        triton.next_power_of_2(values.slots),
        values.slots,
        values.capacity,
        splits,
        sum_BPX.shape[2],
        P=rows,
        TOKENS=pool.tokens,
        PAGE_WIDTH=pool.page_PNY.shape[2],
        GRANULES=values.granules,
        BITS=pool.bits,
        COMPUTE=computing_type(dtype),
        BLOCK_P=block_rows,
        ROW_BLOCKS=row_blocks,
        BLOCK_I=_BLOCK_TILES,
    )
    return partial_BPSC
