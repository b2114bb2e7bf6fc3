"""Values in a server's pages times the softmax of scores: Σ_t w_t c_t, split over the sequence, never rebuilt.

A program has one block of coefficients and a run of tiles. All programs of a run keep the same running maximum; those of the
first block write it.

Shapes: B sequences, H query heads, T tokens that there is room for, N tokens of a tile, W coefficients of a block, R rank,
S splits, X parts of the whole softmax.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_kv.ops.arena_attention.operands import ArenaPages
from lowrank_kv.ops.arena_attention.triton_rows import (
    located_rows,
    row_scales,
    row_units,
    tile_of_sequence,
    tiles_of_page,
)
from lowrank_kv.ops.triton.launch import block, computing_type, online_softmax_step, tuned, tuning_class
from lowrank_kv.ops.triton.scores_by_position import load_scores

_MAX_BLOCK_HEADS = 64


@tuned(
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=2),
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=3),
    triton.Config({"BLOCK_N": 32}, num_warps=4, num_stages=2),
    key=["BLOCK_H", "BLOCK_W", "BITS", "DIFFER", "PAGE_TOKENS", "tuning_class"],
)
@triton.jit(do_not_specialize=["tuning_class", "room", "table_stride_b", "splits", "parts"])
def _arena_values(
    score_ptr,
    page_ptr,
    descriptor_ptr,
    level_table_ptr,
    size_ptr,
    table_ptr,
    past_ptr,
    partial_ptr,
    max_ptr,
    sum_ptr,
    tuning_class,
    room,
    rank,
    page_stride,
    table_stride_b,
    packed,
    marks,
    first_row,
    row_bytes,
    splits,
    parts,
    H: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SINKS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DIFFER: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    split, column = tl.program_id(0), tl.program_id(1)
    b = (tl.program_id(2) // HEAD_BLOCKS).to(tl.int64)
    h = (tl.program_id(2) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    w = column * BLOCK_W + tl.arange(0, BLOCK_W)
    past = tl.load(past_ptr + b)
    tiles = tl.cdiv(past, PAGE_TOKENS) * tiles_of_page(PAGE_TOKENS, BLOCK_N)
    each = tl.cdiv(tiles, splits)
    is_head_H = h < H
    max_H = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    sum_H = tl.zeros((BLOCK_H,), tl.float32)
    total_HW = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    for tile in range(split * each, tl.minimum(split * each + each, tiles)):
        own_page_ptr, n, token_N, is_row_N = tile_of_sequence(
            page_ptr, page_stride, table_ptr + b * table_stride_b, tile, past, PAGE_TOKENS, SINKS, BLOCK_N
        )
        score_HN = load_scores(score_ptr, token_N, is_row_N, h, is_head_H, b, room, H)
        weight_HN, rescale_H, max_H, sum_H = online_softmax_step(score_HN, max_H, sum_H)
        row_ptrs_N, level_N = located_rows(
            own_page_ptr, size_ptr, n, is_row_N, packed, marks, first_row, row_bytes, rank, BITS, GROUP_SIZE, DIFFER,
            BLOCK_N,
        )  # fmt: skip
        weight_HN = (weight_HN * row_scales(row_ptrs_N, is_row_N, BITS)[None, :]).to(COMPUTE)
        unit_NW = row_units(
            row_ptrs_N, level_N, is_row_N, w, rank, descriptor_ptr, level_table_ptr, BITS, GROUP_SIZE, DIFFER
        )
        total_HW = tl.dot(weight_HN, unit_NW.to(COMPUTE), total_HW * rescale_H[:, None], input_precision="ieee")

    row = b * H + h
    partial_ptrs = partial_ptr + (row * splits + split)[:, None] * rank + w[None, :]
    tl.store(partial_ptrs, total_HW, mask=is_head_H[:, None] & (w < rank)[None, :])
    if column == 0:
        part = row * parts + split
        tl.store(max_ptr + part, max_H, mask=is_head_H)
        tl.store(sum_ptr + part, sum_H, mask=is_head_H)


def arena_values(
    score_BTH: Tensor,
    pages: ArenaPages,
    page_BP: Tensor,
    past_B: Tensor,
    max_BHX1: Tensor,
    sum_BHX: Tensor,
    *,
    splits: int,
    dtype: torch.dtype,
) -> Tensor:
    """The sums of weighted coefficients of S splits, (B, H, S, R) fp32, relative to each split's maximum.

    Args:
        score_BTH: fp32 scores times log2 e.
        max_BHX1, sum_BHX: where maxima and sums of weights are written, fp32, to the first S of X parts.
        dtype: in which weights and coefficients are multiplied.
    """
    batch, room, heads = score_BTH.shape
    side = pages.values
    partial_BHSR = torch.empty(batch, heads, splits, side.rank, dtype=torch.float32, device=score_BTH.device)
    block_heads, block_width = min(_MAX_BLOCK_HEADS, block(heads)), block_of(pages)
    head_blocks = triton.cdiv(heads, block_heads)
    _arena_values[splits, triton.cdiv(side.rank, block_width), batch * head_blocks](
        score_BTH,
        pages.page_XY,
        *side.plan_tensors,
        page_BP,
        past_B,
        partial_BHSR,
        max_BHX1,
        sum_BHX,
        tuning_class(room),
        room,
        side.rank,
        pages.page_XY.stride(0),
        page_BP.stride(0),
        *side.offsets,
        splits,
        sum_BHX.shape[2],
        H=heads,
        PAGE_TOKENS=pages.block_size,
        SINKS=pages.num_sinks,
        COMPUTE=computing_type(dtype),
        BLOCK_H=block_heads,
        HEAD_BLOCKS=head_blocks,
        BLOCK_W=block_width,
        **side.constants,
    )
    return partial_BHSR


def block_of(pages: ArenaPages) -> int:
    """Values' coefficients that a program has: of integers fewer, and of planned ones whose places differ from row to row
    fewer again, since these fill registers."""
    side = pages.values
    if side.bits >= 16:
        most = 64
    elif side.bits or not side.differ:
        most = 32
    else:
        most = 16
    return min(most, block(side.rank))
