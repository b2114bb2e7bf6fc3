"""Joint values of one rank times the softmax of scores: Σ_n w_n c_n, split over the sequence, never rebuilt.

A program has one block of a row's numbers and a run of tokens. All programs of a run keep the same running maximum; those of
the first block write it.

Shapes: B batch, P rows of queries, N tokens (room for them), W numbers of a row, S splits, X parts of the whole softmax.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_kv.ops.lowrank_attention.latent_rows import LatentRows
from lowrank_kv.ops.triton.integer_rows import weigh_rows, weigh_scales
from lowrank_kv.ops.triton.launch import (
    block,
    computing_type,
    first_strides,
    online_softmax_step,
    tuned,
    tuning_class,
)
from lowrank_kv.ops.triton.planned_rows import planned_rows, planned_scales, planned_units
from lowrank_kv.ops.triton.scores_by_position import load_scores

_MAX_BLOCK_ROWS = 64


@tuned(
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=3),
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=2),
    triton.Config({"BLOCK_N": 128}, num_warps=8, num_stages=3),
    triton.Config({"BLOCK_N": 32}, num_warps=4, num_stages=2),
    key=["BLOCK_P", "BLOCK_W", "BITS", "tuning_class"],
)
@triton.jit(do_not_specialize=["tuning_class", "room", "splits", "parts"])
def _weighted_rows(
    score_ptr,
    row_ptr,
    scale_ptr,
    descriptor_ptr,
    table_ptr,
    class_ptr,
    mark_ptr,
    size_ptr,
    length_ptr,
    partial_ptr,
    max_ptr,
    sum_ptr,
    tuning_class,
    room,
    rank,
    row_stride_b,
    row_stride_n,
    scale_stride_b,
    scale_stride_n,
    splits,
    parts,
    P: tl.constexpr,
    BITS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    split, column = tl.program_id(0), tl.program_id(1)
    b = (tl.program_id(2) // ROW_BLOCKS).to(tl.int64)
    p = (tl.program_id(2) % ROW_BLOCKS) * BLOCK_P + tl.arange(0, BLOCK_P)
    w = column * BLOCK_W + tl.arange(0, BLOCK_W)
    length = tl.load(length_ptr + b)
    each = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    start, end = split * each, tl.minimum(split * each + each, length)
    # With 4 bits a byte holds the coefficients w and w + half of its row.
    width = (rank + 1) // 2 if BITS == 4 else rank
    is_row_P, is_code_W = p < P, w < width
    max_P = tl.full((BLOCK_P,), float("-inf"), tl.float32)
    sum_P = tl.zeros((BLOCK_P,), tl.float32)
    least_P = tl.zeros((BLOCK_P,), tl.float32)
    total_PW = tl.zeros((BLOCK_P, BLOCK_W), tl.float32)
    high_PW = tl.zeros((BLOCK_P, BLOCK_W if BITS == 4 else 1), tl.float32)
    for block_start in range(start, end, BLOCK_N):
        n = block_start + tl.arange(0, BLOCK_N)
        is_row_N = n < end
        score_PN = load_scores(score_ptr, n, is_row_N, p, is_row_P, b, room, P)
        weight_PN, rescale_P, max_P, sum_P = online_softmax_step(score_PN, max_P, sum_P)
        row_ptrs_N, class_N = planned_rows(
            row_ptr + b * row_stride_b, row_stride_n, class_ptr, mark_ptr, size_ptr, n, is_row_N, BLOCK_N
        )
        if BITS == 0:
            weight_PN *= planned_scales(row_ptrs_N, is_row_N)[None, :]
        elif BITS < 16:
            scale_ptrs = scale_ptr + b * scale_stride_b + n * scale_stride_n
            weight_PN, least_P = weigh_scales(weight_PN, rescale_P, least_P, scale_ptrs, is_row_N)
        weight_PN = weight_PN.to(COMPUTE)
        if BITS == 0:
            code_NW = planned_units(
                row_ptrs_N, class_N, is_row_N, w, rank, descriptor_ptr, table_ptr, class_ptr is not None
            )
        else:
            row_ptrs = row_ptrs_N[:, None] + w[None, :]
            code_NW = tl.load(row_ptrs, mask=is_row_N[:, None] & is_code_W[None, :], other=0)
        total_PW, high_PW = weigh_rows(weight_PN, rescale_P, total_PW, high_PW, code_NW, BITS)

    row = b * P + p
    partial_ptrs = partial_ptr + (row * splits + split)[:, None] * rank + w[None, :]
    is_out_PW = is_row_P[:, None] & is_code_W[None, :]
    tl.store(partial_ptrs, total_PW + least_P[:, None], mask=is_out_PW)
    if BITS == 4:
        # Of an odd rank's last byte the upper half is of no coefficient.
        tl.store(partial_ptrs + width, high_PW + least_P[:, None], mask=is_out_PW & (width + w < rank)[None, :])
    if column == 0:
        part = row * parts + split
        tl.store(max_ptr + part, max_P, mask=is_row_P)
        tl.store(sum_ptr + part, sum_P, mask=is_row_P)


def weighted_rows(
    score_BNP: Tensor,
    values: LatentRows,
    length_B: Tensor,
    max_BPX1: Tensor,
    sum_BPX: Tensor,
    *,
    splits: int,
    dtype: torch.dtype,
) -> Tensor:
    """The sums of weighted coefficients of S splits, (B, P, S, R) fp32, relative to each split's maximum.

    Args:
        score_BNP: fp32 scores times log2 e.
        length_B: tokens in use, int32.
        max_BPX1, sum_BPX: where maxima and sums of weights are written, fp32, to the first S of X parts.
        dtype: in which weights and coefficients are multiplied.
    """
    batch, room, rows = score_BNP.shape
    row_BNY = values.row_BGNY[:, 0]
    scale_BN2 = None if values.scale_BGN2 is None else values.scale_BGN2[:, 0]
    partial_BPSR = torch.empty(batch, rows, splits, values.rank, dtype=torch.float32, device=score_BNP.device)
    block_rows, block_width = min(_MAX_BLOCK_ROWS, block(rows)), block_of(values)
    row_blocks = triton.cdiv(rows, block_rows)
    _weighted_rows[splits, triton.cdiv(values.numbers, block_width), batch * row_blocks](
        score_BNP,
        row_BNY,
        scale_BN2,
        *values.plan_tensors(),
        length_B,
        partial_BPSR,
        max_BPX1,
        sum_BPX,
        tuning_class(room, values.rank, row_BNY.stride(1)),
        room,
        values.rank,
        *first_strides(row_BNY, 2),
        *first_strides(scale_BN2, 2),
        splits,
        sum_BPX.shape[2],
        P=rows,
        BITS=values.bits,
        COMPUTE=computing_type(dtype),
        BLOCK_P=block_rows,
        ROW_BLOCKS=row_blocks,
        BLOCK_W=block_width,
    )
    return partial_BPSR


def block_of(values: LatentRows) -> int:
    """Numbers, or bytes of codes, of a row that a program has; of integers fewer, since a byte may hold two, and of planned
    coefficients fewer again, whose places and levels fill registers."""
    most = 128 if values.bits == 16 else 64
    if values.plan is not None:
        most = 32 if values.class_BM is None else 16
    return min(most, block(values.numbers))
