"""Shared by the kernels that read rows packed by a plan of bits, or by that of their class.

How rows are packed: :mod:`lowrank_kv.stores.bit_plan` and :mod:`lowrank_kv.stores.tokenwise`.

Shapes: N tokens of a tile, Y coefficients that are read together, K classes.
"""

import triton
import triton.language as tl

from lowrank_kv.stores import rows_of_classes

ROWS_BETWEEN_MARKS = tl.constexpr(rows_of_classes.ROWS_BETWEEN_MARKS)


@triton.jit
def planned_rows(row_ptr, row_stride_n, class_ptr, mark_ptr, size_ptr, n, is_row_N, BLOCK_N: tl.constexpr):
    """Pointers to the first bytes of rows, and their classes, which are zeros where there is one for all.

    `n` are consecutive tokens from a multiple of ROWS_BETWEEN_MARKS on; of rows of several classes the pointers are those of
    one sequence.
    """
    if class_ptr is None:
        place_N, class_N = n.to(tl.int64) * row_stride_n, n * 0
    else:
        byte_N = tl.load(class_ptr + n // 4, mask=is_row_N, other=0).to(tl.int32)
        class_N = (byte_N >> (n % 4 * 2)) & 3
        size_N = tl.load(size_ptr + class_N, mask=is_row_N, other=0)
        place_N = marked_places(size_N, mark_ptr, n, is_row_N, BLOCK_N)
    return row_ptr + place_N, class_N


@triton.jit
def marked_places(size_N, mark_ptr, n, is_row_N, BLOCK_N: tl.constexpr):
    """Where rows of these sizes begin that follow one another, bytes from the first, (N,) int64; `n` as of
    :func:`planned_rows`."""
    size_MX = size_N.reshape(BLOCK_N // ROWS_BETWEEN_MARKS, ROWS_BETWEEN_MARKS)
    before_N = (tl.cumsum(size_MX, 1) - size_MX).reshape(BLOCK_N)
    mark_N = tl.load(mark_ptr + n // ROWS_BETWEEN_MARKS, mask=is_row_N, other=0)
    return (mark_N + before_N).to(tl.int64)


@triton.jit
def planned_scales(row_ptrs_N, is_row_N):
    """The scales of rows that begin at these pointers, fp32."""
    return tl.exp2((tl.load(row_ptrs_N, mask=is_row_N, other=0).to(tl.float32) - 128.0) / 8.0)


@triton.jit
def planned_units(row_ptrs_N, class_N, is_row_N, r_Y, rank, descriptor_ptr, table_ptr, HAS_CLASSES: tl.constexpr):
    """The coefficients `r_Y` of rows that begin at these pointers, divided by their scales, (N, Y) fp32; 0 beyond the rank.

    `descriptor_ptr` points to (K, 3, rank) int32 (:attr:`lowrank_kv.stores.token_plans.TokenPlans.descriptor_K3R`).
    """
    is_coef_Y = r_Y < rank
    is_code_NY = is_row_N[:, None] & is_coef_Y[None, :]
    if HAS_CLASSES:
        descriptor_ptrs = descriptor_ptr + class_N[:, None] * (3 * rank) + r_Y[None, :]
        is_described = is_code_NY
    else:
        descriptor_ptrs = descriptor_ptr + r_Y[None, :]
        is_described = is_coef_Y[None, :]
    start = tl.load(descriptor_ptrs, mask=is_described, other=0)
    code_mask = tl.load(descriptor_ptrs + rank, mask=is_described, other=0)
    first = tl.load(descriptor_ptrs + 2 * rank, mask=is_described, other=0)
    shift = start & 7
    byte_ptrs_NY = row_ptrs_N[:, None] + (start >> 3)
    # The byte after a row's last one is another row's, or nobody's.
    low_NY = tl.load(byte_ptrs_NY, mask=is_code_NY, other=0).to(tl.int32)
    high_NY = tl.load(byte_ptrs_NY + 1, mask=is_code_NY & ((code_mask << shift) > 255), other=0).to(tl.int32)
    code_NY = ((low_NY | (high_NY << 8)) >> shift) & code_mask
    level_NY = tl.load(table_ptr + first + code_NY, mask=is_code_NY & (first >= 0), other=0.0)
    return tl.where(first < 0, (code_NY << 16).to(tl.float32, bitcast=True), level_NY)
