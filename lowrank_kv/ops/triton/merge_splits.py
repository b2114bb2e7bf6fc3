"""Joining the parts of a split softmax by their log-sum-exp.

Shapes: B batch, P rows of queries, X parts of the whole softmax, S of them that one result is a sum of, V column blocks of
the result with a maximum of their own, W columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["parts", "first", "splits"])
def _merge(
    partial_ptr,
    max_ptr,
    sum_ptr,
    out_ptr,
    parts,
    first,
    splits,
    width,
    BLOCKS: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    row, column_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = tl.arange(0, BLOCK_X)
    # Only the first column block's programs saw every token.
    max_X = tl.load(max_ptr + (row * parts + x) * BLOCKS, mask=x < parts, other=float("-inf"))
    sum_X = tl.load(sum_ptr + row * parts + x, mask=x < parts, other=0.0)
    largest = tl.max(max_X, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(sum_X * tl.exp2(max_X - largest), 0)
    total = tl.where(total == 0.0, 1.0, total)

    c = column_block * BLOCK_W + tl.arange(0, BLOCK_W)
    own = tl.where(BLOCKS > 1, column_block, 0)
    out_W = tl.zeros((BLOCK_W,), tl.float32)
    for start in range(0, splits, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        max_S = tl.load(max_ptr + (row * parts + first + s) * BLOCKS + own, mask=s < splits, other=float("-inf"))
        # Sums of nothing need not have been written.
        partial_SW = tl.load(
            partial_ptr + (row * splits + s)[:, None] * width + c[None, :],
            mask=(max_S > float("-inf"))[:, None] & (c < width)[None, :],
            other=0.0,
        )
        out_W += tl.sum(partial_SW * tl.exp2(max_S - largest)[:, None], 0)
    tl.store(out_ptr + row * width + c, (out_W / total).to(out_ptr.dtype.element_ty), mask=c < width)


def merge(
    partial_BPSW: Tensor, max_BPXV: Tensor, sum_BPX: Tensor, *, first: int, dtype: torch.dtype, block_width: int
) -> Tensor:
    """Σ_s partial_s · 2^(max_s − max) / Σ_x sum_x · 2^(max_x − max), (B, P, W) in `dtype`.

    Args:
        partial_BPSW: fp32 sums of weighted rows, each relative to its own part's maximum; not read where that is -inf.
        max_BPXV, sum_BPX: fp32 maxima (times log2 e) and sums of weights of all parts of the softmax; of the V maxima of
            a part the first is over all its tokens.
        first: which of the X parts is the first of these S.
        block_width: columns that share a maximum, where V > 1; a power of two.
    """
    batch, rows, splits, width = partial_BPSW.shape
    parts, blocks = max_BPXV.shape[2:]
    out_BPW = torch.empty(batch, rows, width, dtype=dtype, device=partial_BPSW.device)
    _merge[batch * rows, triton.cdiv(width, block_width)](
        partial_BPSW,
        max_BPXV,
        sum_BPX,
        out_BPW,
        parts,
        first,
        splits,
        width,
        BLOCKS=blocks,
        BLOCK_X=triton.next_power_of_2(parts),
        BLOCK_S=min(16, triton.next_power_of_2(splits)),
        BLOCK_W=block_width,
        num_warps=4,
    )
    return out_BPW
