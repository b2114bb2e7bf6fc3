"""Scores of paged keys: rebuilt and rotated within the kernel, or on their coefficients where nothing rotates them.

A program rebuilds one tile of keys, one KV head after another (:mod:`lowrank_kv.ops.triton.rebuild_keys`), and keeps the
angles of their positions, which all heads share. Scores are written by position, with all heads of a token side by side:
the tiles of the values, which have other tokens, find them there.

Shapes: B batch, G KV heads, M rows of queries that share one, P = G·M, Q queries, D head dim, F = D/2, C = G·D, T capacity,
N tokens of a tile, K granules of the width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_kv.ops.paged_attention.triton_pages import load_codes, load_page_numbers, page_number
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.triton.integer_rows import load_scales
from lowrank_kv.ops.triton.launch import block, computing_type, first_strides, tuned
from lowrank_kv.ops.triton.rebuild_keys import add_rebuilt, angles, pairs, query_halves, rotated, scores_of_halves
from lowrank_kv.ops.triton.scores_by_position import store_scores
from lowrank_kv.stores.paged import PagedStore


@tuned(
    triton.Config({"GROUPS_EACH": 8}, num_warps=8, num_stages=3),
    triton.Config({"GROUPS_EACH": 8}, num_warps=8, num_stages=4),
    triton.Config({"GROUPS_EACH": 4}, num_warps=8, num_stages=3),
    triton.Config({"GROUPS_EACH": 2}, num_warps=8, num_stages=3),
    # For tiles of 64 tokens and halves of 64 dims: beyond it spills.
    triton.Config({"GROUPS_EACH": 8}, num_warps=4, num_stages=3),
    key=["room_class", "TOKENS", "PAGE_WIDTH", "GROUPS", "HALF", "BLOCK_M", "BITS"],
)
@triton.jit(do_not_specialize=["mask_stride_b", "mask_stride_q"])
def _rebuilt_scores(
    query_ptr,
    decoder_ptr,
    page_ptr,
    tile_page_ptr,
    tile_granules_ptr,
    tile_rows_ptr,
    position_ptr,
    scale_ptr,
    cos_ptr,
    sin_ptr,
    mask_ptr,
    score_ptr,
    room_class,
    slots,
    capacity,
    table_stride_b,
    table_stride_t,
    mask_stride_b,
    mask_stride_q,
    scaling,
    softcap,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE_WIDTH: tl.constexpr,
    GRANULES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BITS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    GROUPS_EACH: tl.constexpr,
):
    slot, first_group, b = tl.program_id(0), tl.program_id(1) * GROUPS_EACH, tl.program_id(2).to(tl.int64)
    tile = b * slots + slot
    rows = tl.load(tile_rows_ptr + tile)
    if rows > 0:
        n, y, m, f = tl.arange(0, TOKENS), tl.arange(0, PAGE_WIDTH), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_F)
        is_row_N, is_dim_F, is_row_M = n < rows, f < HALF, m < ROWS
        token_N = tl.load(position_ptr + tile * TOKENS + n, mask=is_row_N, other=0)
        # Of two codes in a byte one granule's first half of coefficients is in the low bits.
        halves: tl.constexpr = 2 if BITS == 4 else 1
        chunks = tl.load(tile_granules_ptr + tile) * halves
        page_K = load_page_numbers(tile_page_ptr, tile, GRANULES, BLOCK_K)
        # Keys of rank 0 take one chunk of zeros.
        is_coef_N = is_row_N & (chunks > 0)
        chunks = tl.maximum(chunks, 1)
        if BITS < 16:
            step_N, least_N = load_scales(scale_ptr + (tile * TOKENS + n) * 2, is_coef_N)
        first_F, second_F = pairs(f, HALF, ROTARY_HALF)
        table_row_N = b * table_stride_b + token_N * table_stride_t
        # Beside halves of more than 64 dims they would spill, and are read anew for every KV head.
        is_kept: tl.constexpr = BLOCK_F <= 64
        if is_kept:
            cos_NF, sin_NF = angles(cos_ptr, sin_ptr, table_row_N, is_row_N, f, ROTARY_HALF)
        # Flattened, the loops ask for one head's chunks while the head before is multiplied.
        for group in tl.range(first_group, tl.minimum(first_group + GROUPS_EACH, GROUPS), flatten=is_kept):
            first_NF = tl.zeros((TOKENS, BLOCK_F), tl.float32)
            second_NF = tl.zeros((TOKENS, BLOCK_F), tl.float32)
            for chunk in range(chunks):
                page = page_number(page_K, chunk // halves, BLOCK_K)
                coef_NY = load_codes(page_ptr, page, chunk % halves, n, is_coef_N, TOKENS, PAGE_WIDTH, BITS)
                if BITS < 16:
                    coef_NY = coef_NY.to(tl.float32) * step_N[:, None] + least_N[:, None]
                coef_NY = coef_NY.to(COMPUTE)
                decoder_ptrs = decoder_ptr + (chunk * PAGE_WIDTH + y)[:, None] * (2 * HALF * GROUPS) + group * 2 * HALF
                first_NF = add_rebuilt(first_NF, coef_NY, decoder_ptrs + first_F[None, :], is_dim_F[None, :])
                second_NF = add_rebuilt(second_NF, coef_NY, decoder_ptrs + second_F[None, :], is_dim_F[None, :])
            if not is_kept:
                cos_NF, sin_NF = angles(cos_ptr, sin_ptr, table_row_N, is_row_N, f, ROTARY_HALF)
            first_NF, second_NF = rotated(first_NF, second_NF, cos_NF, sin_NF)
            row_M = group * ROWS + m
            first_FM, second_FM = query_halves(
                query_ptr + b * GROUPS * ROWS * 2 * HALF, row_M, is_row_M, f, HALF, ROTARY_HALF, COMPUTE
            )
            score_NM = scores_of_halves(first_NF, second_NF, first_FM, second_FM)
            store_scores(
                score_ptr, mask_ptr, score_NM, token_N, is_row_N, row_M, is_row_M, b, capacity, mask_stride_b,
                mask_stride_q, scaling, softcap, QUERIES, GROUPS * ROWS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["mask_stride_b", "mask_stride_q"])
def _latent_scores(
    query_ptr,
    page_ptr,
    tile_page_ptr,
    tile_granules_ptr,
    tile_rows_ptr,
    position_ptr,
    scale_ptr,
    mask_ptr,
    score_ptr,
    slots,
    capacity,
    mask_stride_b,
    mask_stride_q,
    scaling,
    softcap,
    P: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE_WIDTH: tl.constexpr,
    GRANULES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BITS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    slot, first_row, b = tl.program_id(0), tl.program_id(1) * BLOCK_P, tl.program_id(2).to(tl.int64)
    tile = b * slots + slot
    rows = tl.load(tile_rows_ptr + tile)
    if rows > 0:
        n, y, row_P = tl.arange(0, TOKENS), tl.arange(0, PAGE_WIDTH), first_row + tl.arange(0, BLOCK_P)
        is_row_N, is_row_P = n < rows, row_P < P
        token_N = tl.load(position_ptr + tile * TOKENS + n, mask=is_row_N, other=0)
        halves: tl.constexpr = 2 if BITS == 4 else 1
        width: tl.constexpr = GRANULES * halves * PAGE_WIDTH
        score_NP = tl.zeros((TOKENS, BLOCK_P), tl.float32)
        query_sum_P = tl.zeros((BLOCK_P,), tl.float32)
        page_K = load_page_numbers(tile_page_ptr, tile, GRANULES, BLOCK_K)
        for chunk in range(tl.load(tile_granules_ptr + tile) * halves):
            page = page_number(page_K, chunk // halves, BLOCK_K)
            coef_NY = load_codes(page_ptr, page, chunk % halves, n, is_row_N, TOKENS, PAGE_WIDTH, BITS).to(COMPUTE)
            query_ptrs = query_ptr + (b * P + row_P)[None, :] * width + (chunk * PAGE_WIDTH + y)[:, None]
            query_YP = tl.load(query_ptrs, mask=is_row_P[None, :], other=0.0).to(COMPUTE)
            score_NP = tl.dot(coef_NY, query_YP, score_NP, input_precision="ieee")
            query_sum_P += tl.sum(query_YP.to(tl.float32), 0)
        if BITS < 16:
            step_N, least_N = load_scales(scale_ptr + (tile * TOKENS + n) * 2, is_row_N)
            score_NP = score_NP * step_N[:, None] + least_N[:, None] * query_sum_P[None, :]
        store_scores(
            score_ptr, mask_ptr, score_NP, token_N, is_row_N, row_P, is_row_P, b, capacity, mask_stride_b,
            mask_stride_q, scaling, softcap, QUERIES, P,
        )  # fmt: skip


def paged_scores(
    query_BGMD: Tensor,
    keys: PagedStore,
    decoder_CC: Tensor,
    *,
    queries: int,
    scaling: float,
    rotation: RotaryTable | None,
    softcap: float | None,
    mask_BQT: Tensor | None,
) -> Tensor:
    """Scores times log2 e of all rows by their position, (B, T, P) fp32; -inf where masked, undefined where no row is.

    Arguments as in :func:`lowrank_kv.ops.paged_attention.triton.paged_attention`; `query_BGMD` and `decoder_CC` are
    contiguous.
    """
    batch, groups, rows, head_dim = query_BGMD.shape
    pool, total = keys.pool, groups * rows
    page_width = pool.page_PNY.shape[2]
    score_BTP = torch.empty(batch, keys.capacity, total, dtype=torch.float32, device=query_BGMD.device)
    tables = (
        keys.tile_page_BSK,
        keys.tile_granules_BS,
        keys.tile_rows_BS,
        keys.tile_position_BSN,
        keys.tile_scale_BSN2,
    )
    mask_strides = first_strides(mask_BQT, 2)
    shared = {
        "QUERIES": queries,
        "TOKENS": pool.tokens,
        "PAGE_WIDTH": page_width,
        "GRANULES": keys.granules,
        "BLOCK_K": triton.next_power_of_2(keys.granules),
        "BITS": pool.bits,
        "COMPUTE": computing_type(query_BGMD.dtype),
    }
    if rotation is None:
        decoder_GDC = decoder_CC.view(-1, groups, head_dim).permute(1, 2, 0)
        latent_BGMC = (query_BGMD @ decoder_GDC).contiguous()
        block_rows = min(64, block(total))
        _latent_scores[keys.slots, triton.cdiv(total, block_rows), batch](
            latent_BGMC, pool.page_PNY, *tables, mask_BQT, score_BTP, keys.slots, keys.capacity, *mask_strides, scaling,
            softcap, P=total, BLOCK_P=block_rows, num_warps=8, num_stages=3, **shared,
        )  # fmt: skip
        return score_BTP
    _rebuilt_scores[lambda chosen: (keys.slots, triton.cdiv(groups, chosen["GROUPS_EACH"]), batch)](
        query_BGMD,
        decoder_CC,
        pool.page_PNY,
        *tables,
        rotation.cos_BTF,
        rotation.sin_BTF,
        mask_BQT,
        score_BTP,
        triton.next_power_of_2(keys.slots),  # not tuned for anew at every capacity
        keys.slots,
        keys.capacity,
        *first_strides(rotation.cos_BTF, 2),
        *mask_strides,
        scaling,
        softcap,
        GROUPS=groups,
        ROWS=rows,
        HALF=head_dim // 2,
        ROTARY_HALF=rotation.cos_BTF.shape[2],
        BLOCK_M=block(rows),
        BLOCK_F=block(head_dim // 2),
        **shared,
    )
    return score_BTP
