"""Scores of keys in a server's pages, rebuilt and rotated within the kernel.

A program rebuilds a tile of one page, one KV head after another (:mod:`lowrank_kv.ops.triton.rebuild_keys`), and writes the
scores by position, all heads of a token side by side.

Shapes: B sequences, G KV heads, M query heads that share one, H = G·M, D head dim, F = D/2, C = G·D, P pages of a sequence
at most, T their tokens, N tokens of a tile, R rank.
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
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.triton.launch import block, computing_type, tuned, tuning_class
from lowrank_kv.ops.triton.rebuild_keys import add_rebuilt, angles, pairs, query_halves, rotated, scores_of_halves
from lowrank_kv.ops.triton.scores_by_position import store_scores


@tuned(
    triton.Config({"BLOCK_N": 64, "BLOCK_Y": 16, "GROUPS_EACH": 1}, num_warps=8, num_stages=2),
    triton.Config({"BLOCK_N": 64, "BLOCK_Y": 32, "GROUPS_EACH": 1}, num_warps=8, num_stages=2),
    triton.Config({"BLOCK_N": 32, "BLOCK_Y": 32, "GROUPS_EACH": 1}, num_warps=4, num_stages=2),
    # Not for every rank: water-filling gives each layer its own.
    key=["GROUPS", "HALF", "BLOCK_M", "BITS", "DIFFER", "PAGE_TOKENS", "tuning_class"],
)
@triton.jit(do_not_specialize=["tuning_class", "room", "table_stride_b"])
def _arena_scores(
    query_ptr,
    decoder_ptr,
    page_ptr,
    descriptor_ptr,
    level_table_ptr,
    size_ptr,
    table_ptr,
    past_ptr,
    cos_ptr,
    sin_ptr,
    score_ptr,
    tuning_class,
    room,
    rank,
    decoder_stride_r,
    page_stride,
    table_stride_b,
    angle_stride_t,
    packed,
    marks,
    first_row,
    row_bytes,
    scaling,
    softcap,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SINKS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DIFFER: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    GROUPS_EACH: tl.constexpr,
):
    tile, first_group, b = tl.program_id(0), tl.program_id(1) * GROUPS_EACH, tl.program_id(2).to(tl.int64)
    past = tl.load(past_ptr + b)
    if tile // tiles_of_page(PAGE_TOKENS, BLOCK_N) * PAGE_TOKENS < past:
        own_page_ptr, n, token_N, is_row_N = tile_of_sequence(
            page_ptr, page_stride, table_ptr + b * table_stride_b, tile, past, PAGE_TOKENS, SINKS, BLOCK_N
        )
        row_ptrs_N, level_N = located_rows(
            own_page_ptr, size_ptr, n, is_row_N, packed, marks, first_row, row_bytes, rank, BITS, GROUP_SIZE, DIFFER,
            BLOCK_N,
        )  # fmt: skip
        scale_N = row_scales(row_ptrs_N, is_row_N, BITS)
        y, m, f = tl.arange(0, BLOCK_Y), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_F)
        is_dim_F, is_row_M = f < HALF, m < ROWS
        first_F, second_F = pairs(f, HALF, ROTARY_HALF)
        for group in range(first_group, tl.minimum(first_group + GROUPS_EACH, GROUPS)):
            first_NF = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
            second_NF = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
            for chunk in range(0, rank, BLOCK_Y):
                r_Y = chunk + y
                unit_NY = row_units(
                    row_ptrs_N, level_N, is_row_N, r_Y, rank, descriptor_ptr, level_table_ptr, BITS, GROUP_SIZE, DIFFER
                )
                coef_NY = (unit_NY * scale_N[:, None]).to(COMPUTE)
                is_decoder_YF = (r_Y < rank)[:, None] & is_dim_F[None, :]
                decoder_ptrs = decoder_ptr + r_Y[:, None] * decoder_stride_r + group * 2 * HALF
                first_NF = add_rebuilt(first_NF, coef_NY, decoder_ptrs + first_F[None, :], is_decoder_YF)
                second_NF = add_rebuilt(second_NF, coef_NY, decoder_ptrs + second_F[None, :], is_decoder_YF)
            row_M = group * ROWS + m
            if cos_ptr is not None:
                # Read anew for every KV head: kept, they would take as many registers as the key itself.
                cos_NF, sin_NF = angles(cos_ptr, sin_ptr, token_N * angle_stride_t, is_row_N, f, ROTARY_HALF)
                first_NF, second_NF = rotated(first_NF, second_NF, cos_NF, sin_NF)
            first_FM, second_FM = query_halves(
                query_ptr + b * GROUPS * ROWS * 2 * HALF, row_M, is_row_M, f, HALF, ROTARY_HALF, COMPUTE
            )
            score_NM = scores_of_halves(first_NF, second_NF, first_FM, second_FM)
            store_scores(
                score_ptr, None, score_NM, token_N, is_row_N, row_M, is_row_M, b, room, 0, 0, scaling, softcap, 1,
                GROUPS * ROWS,
            )  # fmt: skip


def arena_scores(
    query_BGMD: Tensor,
    pages: ArenaPages,
    page_BP: Tensor,
    past_B: Tensor,
    key_decoder_RC: Tensor,
    *,
    scaling: float,
    rotation: RotaryTable | None,
    softcap: float | None,
) -> Tensor:
    """Scores times log2 e of all rows by their position, (B, T, H) fp32, undefined where no row is.

    Arguments as in :func:`lowrank_kv.ops.arena_attention.triton.arena_attention`; `query_BGMD` is contiguous.
    """
    batch, groups, rows, head_dim = query_BGMD.shape
    side, most_pages = pages.keys, page_BP.shape[1]
    room = most_pages * pages.block_size
    score_BTH = torch.empty(batch, room, groups * rows, dtype=torch.float32, device=query_BGMD.device)
    cos, sin = (None, None) if rotation is None else (rotation.cos_BTF, rotation.sin_BTF)

    def grid(chosen: dict) -> tuple[int, int, int]:
        tiles = most_pages * triton.cdiv(pages.block_size, chosen["BLOCK_N"])
        return tiles, triton.cdiv(groups, chosen["GROUPS_EACH"]), batch

    _arena_scores[grid](
        query_BGMD,
        key_decoder_RC,
        pages.page_XY,
        *side.plan_tensors,
        page_BP,
        past_B,
        cos,
        sin,
        score_BTH,
        tuning_class(room, key_decoder_RC.stride(0)),
        room,
        side.rank,
        key_decoder_RC.stride(0),
        pages.page_XY.stride(0),
        page_BP.stride(0),
        0 if cos is None else cos.stride(1),
        *side.offsets,
        scaling,
        softcap,
        GROUPS=groups,
        ROWS=rows,
        HALF=head_dim // 2,
        ROTARY_HALF=head_dim // 2 if cos is None else cos.shape[2],
        PAGE_TOKENS=pages.block_size,
        SINKS=pages.num_sinks,
        COMPUTE=computing_type(query_BGMD.dtype),
        BLOCK_M=block(rows),
        BLOCK_F=block(head_dim // 2),
        **side.constants,
    )
    return score_BTH
