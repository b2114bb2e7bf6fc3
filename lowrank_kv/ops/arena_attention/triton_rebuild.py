"""The coefficients of a sequence's first rows, unpacked from its pages: keys and values are rebuilt from them where many
queries attend at once.

Shapes: P pages of a sequence, N rows, R coefficients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_kv.ops.arena_attention.operands import ArenaPages, ArenaSide
from lowrank_kv.ops.arena_attention.triton_rows import located_rows, row_scales, row_units, tile_of_sequence
from lowrank_kv.ops.triton.launch import block

_BLOCK_ROWS, _MAX_BLOCK_WIDTH = 32, 32


@triton.jit(do_not_specialize=["count"])
def _rows_kernel(
    page_ptr,
    table_ptr,
    descriptor_ptr,
    level_table_ptr,
    size_ptr,
    out_ptr,
    count,
    rank,
    page_stride,
    packed,
    marks,
    first_row,
    row_bytes,
    PAGE_TOKENS: tl.constexpr,
    SINKS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    DIFFER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Y: tl.constexpr,
):
    own_page_ptr, n, token_N, is_row_N = tile_of_sequence(
        page_ptr, page_stride, table_ptr, tl.program_id(0), count + SINKS, PAGE_TOKENS, SINKS, BLOCK_N
    )
    row_ptrs_N, level_N = located_rows(
        own_page_ptr, size_ptr, n, is_row_N, packed, marks, first_row, row_bytes, rank, BITS, GROUP_SIZE, DIFFER,
        BLOCK_N,
    )  # fmt: skip
    r_Y = tl.program_id(1) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    unit_NY = row_units(
        row_ptrs_N, level_N, is_row_N, r_Y, rank, descriptor_ptr, level_table_ptr, BITS, GROUP_SIZE, DIFFER
    )
    coef_NY = unit_NY * row_scales(row_ptrs_N, is_row_N, BITS)[:, None]
    out_ptrs = out_ptr + (token_N - SINKS).to(tl.int64)[:, None] * rank + r_Y[None, :]
    tl.store(out_ptrs, coef_NY.to(out_ptr.dtype.element_ty), mask=is_row_N[:, None] & (r_Y < rank)[None, :])


def arena_rows(pages: ArenaPages, side: ArenaSide, page_P: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The coefficients of a sequence's first `count` rows, (N, R) in `dtype`, zero where a token has none.

    Args:
        side: of the pages: their keys, or values.
        page_P: the sequence's pages, int32, contiguous.
    """
    out_NR = torch.empty(count, side.rank, dtype=dtype, device=page_P.device)
    if count == 0:
        return out_NR
    block_width = min(_MAX_BLOCK_WIDTH, block(side.rank))
    in_use = triton.cdiv(count + pages.num_sinks, pages.block_size)
    _rows_kernel[in_use * triton.cdiv(pages.block_size, _BLOCK_ROWS), triton.cdiv(side.rank, block_width)](
        pages.page_XY,
        page_P,
        *side.plan_tensors,
        out_NR,
        count,
        side.rank,
        pages.page_XY.stride(0),
        *side.offsets,
        PAGE_TOKENS=pages.block_size,
        SINKS=pages.num_sinks,
        BLOCK_N=_BLOCK_ROWS,
        BLOCK_Y=block_width,
        num_warps=4,
        **side.constants,
    )
    return out_NR
