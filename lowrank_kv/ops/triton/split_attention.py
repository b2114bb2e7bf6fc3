"""Attention of a few queries over rows of keys and values of any width, the sequence split over programs.

Rows are coefficients, integers of 8 or 4 bits, or plain keys and values. Integers are never turned back into numbers one
by one: with row n = step_n · code_n + least_n, q · row_n = step_n (q · code_n) + least_n Σ q, and
Σ w_n row_n = Σ (w_n step_n) code_n + Σ w_n least_n.

Shapes: B batch, G KV heads, M rows of queries that share one, P = G·M, Q queries, N tokens, R key width, W value width,
X parts of the whole softmax, S of them made here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_kv.ops.triton.integer_rows import load_scales, weigh_rows, weigh_scales
from lowrank_kv.ops.triton.launch import (
    LOG2E,
    block,
    capped,
    computing_type,
    first_strides,
    online_softmax_step,
    tuned,
    tuning_class,
)


@tuned(
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=3),
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=4),
    triton.Config({"BLOCK_N": 128}, num_warps=4, num_stages=3),
    triton.Config({"BLOCK_N": 32}, num_warps=4, num_stages=4),
    # Where wide heads leave no shared memory for more; the tuner passes over what does not fit.
    triton.Config({"BLOCK_N": 32}, num_warps=4, num_stages=1),
    # By blocks, not widths: ranks differ from layer to layer.
    key=["BLOCK_R", "BLOCK_W", "KEY_BITS", "VALUE_BITS", "BLOCK_M", "tuning_class"],
)
@triton.jit(do_not_specialize=["tuning_class", "mask_stride_b", "mask_stride_q", "splits", "parts", "first"])
def _attend_split(
    query_ptr,
    key_ptr,
    key_scale_ptr,
    value_ptr,
    value_scale_ptr,
    length_ptr,
    mask_ptr,
    partial_ptr,
    max_ptr,
    sum_ptr,
    tuning_class,
    key_width,
    value_width,
    key_stride_b,
    key_stride_g,
    key_stride_n,
    key_scale_stride_b,
    key_scale_stride_g,
    key_scale_stride_n,
    value_stride_b,
    value_stride_g,
    value_stride_n,
    value_scale_stride_b,
    value_scale_stride_g,
    value_scale_stride_n,
    mask_stride_b,
    mask_stride_q,
    splits,
    parts,
    first,
    scaling,
    softcap,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    split, group, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = tl.load(length_ptr + b)
    each = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    start, end = split * each, tl.minimum(split * each + each, length)
    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    w = tl.arange(0, BLOCK_W)
    # With 4 bits a byte holds the coefficients r and r + half of its row.
    key_bytes = (key_width + 1) // 2 if KEY_BITS == 4 else key_width
    value_bytes = (value_width + 1) // 2 if VALUE_BITS == 4 else value_width
    query_ptrs = query_ptr + ((b * GROUPS + group) * ROWS + m)[:, None] * key_width + r[None, :]
    query_MR = tl.load(query_ptrs, mask=(m < ROWS)[:, None] & (r < key_bytes)[None, :], other=0.0).to(COMPUTE)
    query_sum_M = tl.sum(query_MR.to(tl.float32), 1)
    if KEY_BITS == 4:
        is_high_MR = (m < ROWS)[:, None] & (r + key_bytes < key_width)[None, :]
        query_high_MR = tl.load(query_ptrs + key_bytes, mask=is_high_MR, other=0.0).to(COMPUTE)
        query_sum_M += tl.sum(query_high_MR.to(tl.float32), 1)

    key_ptr += b * key_stride_b + group * key_stride_g
    value_ptr += b * value_stride_b + group * value_stride_g
    max_M = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((BLOCK_M,), tl.float32)
    least_M = tl.zeros((BLOCK_M,), tl.float32)
    total_MW = tl.zeros((BLOCK_M, BLOCK_W), tl.float32)
    high_MW = tl.zeros((BLOCK_M, BLOCK_W if VALUE_BITS == 4 else 1), tl.float32)
    for block_start in range(start, end, BLOCK_N):
        n = block_start + tl.arange(0, BLOCK_N)
        is_row_N = n < end
        key_RN = tl.load(
            key_ptr + n[None, :] * key_stride_n + r[:, None],
            mask=is_row_N[None, :] & (r < key_bytes)[:, None],
            other=0,
        )
        if KEY_BITS == 4:
            score_MN = tl.dot(query_MR, (key_RN & 15).to(COMPUTE), input_precision="ieee")
            score_MN = tl.dot(query_high_MR, (key_RN >> 4).to(COMPUTE), score_MN, input_precision="ieee")
        else:
            score_MN = tl.dot(query_MR, key_RN.to(COMPUTE), input_precision="ieee")
        if KEY_BITS < 16:
            scale_ptrs = key_scale_ptr + b * key_scale_stride_b + group * key_scale_stride_g + n * key_scale_stride_n
            step_N, least_N = load_scales(scale_ptrs, is_row_N)
            score_MN = score_MN * step_N[None, :] + query_sum_M[:, None] * least_N[None, :]
        score_MN *= scaling
        if softcap is not None:
            score_MN = capped(score_MN, softcap)
        is_seen_MN = is_row_N[None, :] & (m < ROWS)[:, None]
        if mask_ptr is not None:
            mask_ptrs = mask_ptr + b * mask_stride_b + (m % QUERIES)[:, None] * mask_stride_q + n[None, :]
            is_seen_MN = is_seen_MN & (tl.load(mask_ptrs, mask=is_seen_MN, other=0) != 0)
        score_MN = tl.where(is_seen_MN, score_MN * LOG2E, float("-inf"))

        weight_MN, rescale_M, max_M, sum_M = online_softmax_step(score_MN, max_M, sum_M)
        if VALUE_BITS < 16:
            scale_ptrs = (
                value_scale_ptr + b * value_scale_stride_b + group * value_scale_stride_g + n * value_scale_stride_n
            )
            weight_MN, least_M = weigh_scales(weight_MN, rescale_M, least_M, scale_ptrs, is_row_N)
        value_NW = tl.load(
            value_ptr + n[:, None] * value_stride_n + w[None, :],
            mask=is_row_N[:, None] & (w < value_bytes)[None, :],
            other=0,
        )
        total_MW, high_MW = weigh_rows(weight_MN.to(COMPUTE), rescale_M, total_MW, high_MW, value_NW, VALUE_BITS)

    p = (b * GROUPS + group) * ROWS + m
    partial_ptrs = partial_ptr + (p * splits + split)[:, None] * value_width + w[None, :]
    is_out_MW = (m < ROWS)[:, None] & (w < value_bytes)[None, :]
    tl.store(partial_ptrs, total_MW + least_M[:, None], mask=is_out_MW)
    if VALUE_BITS == 4:
        is_high_MW = (m < ROWS)[:, None] & (w + value_bytes < value_width)[None, :]
        # Of an odd width's last byte the upper half is of no coefficient.
        tl.store(partial_ptrs + value_bytes, high_MW + least_M[:, None], mask=is_high_MW & is_out_MW)
    part = p * parts + first + split
    tl.store(max_ptr + part, max_M, mask=m < ROWS)
    tl.store(sum_ptr + part, sum_M, mask=m < ROWS)


def attend_split(
    query_BGMR: Tensor,
    key_BGNY: Tensor,
    value_BGNY: Tensor,
    length_B: Tensor,
    max_BPX1: Tensor,
    sum_BPX: Tensor,
    *,
    first: int,
    splits: int,
    queries: int,
    scaling: float,
    softcap: float | None,
    mask_BQN: Tensor | None,
    value_width: int,
    key_scale_BGN2: Tensor | None = None,
    value_scale_BGN2: Tensor | None = None,
    key_bits: int = 16,
    value_bits: int = 16,
) -> Tensor:
    """The sums of weighted value rows of S splits, (B, P, S, W) fp32, each relative to its own maximum.

    Args:
        query_BGMR: queries in the space of the key rows, contiguous.
        key_BGNY, value_BGNY: rows, contiguous in the last dim; codes as uint8.
        length_B: rows in use, int32.
        max_BPX1, sum_BPX: where maxima (times log2 e) and sums of weights are written, fp32, to parts `first` to
            ``first + splits``.
        queries: Q; row m of the queries is query m mod Q.
        softcap: scores s become softcap · tanh(s / softcap); None leaves them.
        mask_BQN: bool, True where a query may see a token; 1 in place of B where all sequences share it.
        value_width: W, of which `value_BGNY` may hold two to a byte.
    """
    batch, groups, rows, key_width = query_BGMR.shape
    partial_BPSW = torch.empty(batch, groups * rows, splits, value_width, dtype=torch.float32, device=query_BGMR.device)
    _attend_split[splits, groups, batch](
        query_BGMR,
        key_BGNY,
        key_scale_BGN2,
        value_BGNY,
        value_scale_BGN2,
        length_B,
        mask_BQN,
        partial_BPSW,
        max_BPX1,
        sum_BPX,
        tuning_class(key_BGNY.shape[2], key_width, value_width, key_BGNY.stride(2), value_BGNY.stride(2)),
        key_width,
        value_width,
        *key_BGNY.stride()[:3],
        *first_strides(key_scale_BGN2, 3),
        *value_BGNY.stride()[:3],
        *first_strides(value_scale_BGN2, 3),
        *first_strides(mask_BQN, 2),
        splits,
        max_BPX1.shape[2],
        first,
        scaling,
        softcap,
        GROUPS=groups,
        ROWS=rows,
        QUERIES=queries,
        KEY_BITS=key_bits,
        VALUE_BITS=value_bits,
        COMPUTE=computing_type(query_BGMR.dtype),
        BLOCK_M=block(rows),
        BLOCK_R=block(key_BGNY.shape[3]),
        BLOCK_W=block(value_BGNY.shape[3]),
    )
    return partial_BPSW
