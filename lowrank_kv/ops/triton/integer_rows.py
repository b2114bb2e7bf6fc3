"""Shared by the kernels that read rows of integers, of 8 or 4 bits, whose steps and least values stand beside them.

Rows that are weighed are never turned back into numbers: Σ w_n row_n = Σ (w_n step_n) code_n + Σ w_n least_n. With 4 bits a
byte holds two codes of its row, which are summed apart.

Shapes: N rows of a tile, P rows of queries, W codes, bytes or numbers of a row.
"""

import triton
import triton.language as tl


@triton.jit
def load_scales(scale_ptrs_N, is_row_N):
    """Steps and least values, (N,) fp32 each; 0 where masked."""
    step_N = tl.load(scale_ptrs_N, mask=is_row_N, other=0.0).to(tl.float32)
    least_N = tl.load(scale_ptrs_N + 1, mask=is_row_N, other=0.0).to(tl.float32)
    return step_N, least_N


@triton.jit
def weigh_scales(weight_PN, rescale_P, least_P, scale_ptrs_N, is_row_N):
    """What codes are weighed with, (P, N), and the running sums of weighted least values, (P,), after these rows.

    `rescale_P` is what sums so far fade by (:func:`lowrank_kv.ops.triton.launch.online_softmax_step`).
    """
    step_N, least_N = load_scales(scale_ptrs_N, is_row_N)
    least_P = least_P * rescale_P + tl.sum(weight_PN * least_N[None, :], 1)
    return weight_PN * step_N[None, :], least_P


@triton.jit
def weigh_rows(weight_PN, rescale_P, total_PW, high_PW, row_NW, BITS: tl.constexpr):
    """The running sums of weighted rows of codes, or of numbers, (P, W), after these; multiplied in the weights' dtype.

    With 4 bits the sums of low codes and those of high ones; otherwise `high_PW` stays as it is.
    """
    if BITS == 4:
        # One half after the other: codes of both at once take more registers.
        low_NW = (row_NW & 15).to(weight_PN.dtype)
        total_PW = tl.dot(weight_PN, low_NW, total_PW * rescale_P[:, None], input_precision="ieee")
        upper_NW = (row_NW >> 4).to(weight_PN.dtype)
        high_PW = tl.dot(weight_PN, upper_NW, high_PW * rescale_P[:, None], input_precision="ieee")
    else:
        total_PW = tl.dot(weight_PN, row_NW.to(weight_PN.dtype), total_PW * rescale_P[:, None], input_precision="ieee")
    return total_PW, high_PW
