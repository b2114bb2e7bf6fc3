"""Scores between two kernels: one writes them by position, all heads of a token side by side, and the next reads them.

Shapes: B batch, P rows of queries, M of them, Q queries, N tokens of a tile.
"""

import triton
import triton.language as tl

from lowrank_kv.ops.triton.launch import LOG2E, capped


@triton.jit
def store_scores(
    score_ptr, mask_ptr, score_NM, token_N, is_row_N, row_M, is_row_M, b, capacity, mask_stride_b, mask_stride_q,
    scaling, softcap, QUERIES: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Scale, cap and mask scores, and write them at their tokens' positions in (B, capacity, P)."""
    score_NM *= scaling
    if softcap is not None:
        score_NM = capped(score_NM, softcap)
    is_out_NM = is_row_N[:, None] & is_row_M[None, :]
    if mask_ptr is not None:
        mask_ptrs = mask_ptr + b * mask_stride_b + (row_M % QUERIES)[None, :] * mask_stride_q + token_N[:, None]
        score_NM = tl.where(tl.load(mask_ptrs, mask=is_out_NM, other=0) != 0, score_NM, float("-inf"))
    tl.store(score_ptr + (b * capacity + token_N)[:, None] * P + row_M[None, :], score_NM * LOG2E, mask=is_out_NM)


@triton.jit
def load_scores(score_ptr, token_N, is_row_N, row_P, is_row_P, b, capacity, P: tl.constexpr):
    """What :func:`store_scores` wrote, (P, N) fp32; -inf for no row."""
    return tl.load(
        score_ptr + (b * capacity + token_N)[None, :] * P + row_P[:, None],
        mask=is_row_N[None, :] & is_row_P[:, None],
        other=float("-inf"),
    )
