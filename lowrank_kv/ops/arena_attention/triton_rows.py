"""Reading rows of a server's pages within a kernel.

Rows of a page are read in tiles, from a multiple of 32 on; a sequence's tiles are numbered page after page. In a sequence's
first page the row 0 is the first token behind those that are exact.

Shapes: N rows of a tile, Y coefficients that are read together, K classes.
"""

import triton
import triton.language as tl

from lowrank_kv.ops.triton.planned_rows import marked_places, planned_rows, planned_scales, planned_units


@triton.jit
def tiles_of_page(PAGE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many tiles a page has."""
    return (PAGE_TOKENS + BLOCK_N - 1) // BLOCK_N


@triton.jit
def tile_of_sequence(
    page_ptr, page_stride, table_ptr, tile, past, PAGE_TOKENS: tl.constexpr, SINKS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """A tile of a sequence of `past` tokens: where its page begins, its rows in the page, their positions in the sequence,
    and whether they are in use.

    `table_ptr` points to the numbers of the sequence's pages.
    """
    tiles = tiles_of_page(PAGE_TOKENS, BLOCK_N)
    page = tile // tiles
    skipped = tl.where(page == 0, SINKS, 0)
    n = (tile % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_N = page * PAGE_TOKENS + skipped + n
    is_row_N = (n < PAGE_TOKENS - skipped) & (token_N < past)
    # A page that is not in use has no number.
    number = tl.load(table_ptr + page, mask=page * PAGE_TOKENS < past, other=0)
    return page_ptr + number.to(tl.int64) * page_stride, n, token_N, is_row_N


@triton.jit
def located_rows(
    page_ptr, size_ptr, n, is_row_N, packed, marks, first_row, row_bytes, rank,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIFFER: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Pointers to the first bytes of a tile's rows, and their levels: classes, zeros where there is one plan for all, or the
    number of their coefficients.

    `page_ptr` points to the page, `size_ptr` to the bytes of a row of each class.
    """
    row_ptr = page_ptr + first_row
    mark_ptr = (page_ptr + marks).to(tl.pointer_type(tl.int32))
    if BITS == 0:
        if DIFFER:
            row_ptrs_N, level_N = planned_rows(
                row_ptr, row_bytes, page_ptr + packed, mark_ptr, size_ptr, n, is_row_N, BLOCK_N
            )
        else:
            row_ptrs_N, level_N = planned_rows(row_ptr, row_bytes, None, None, None, n, is_row_N, BLOCK_N)
    elif DIFFER:
        rank_ptr = (page_ptr + packed).to(tl.pointer_type(tl.uint16))
        level_N = tl.load(rank_ptr + n, mask=is_row_N, other=0).to(tl.int32)
        size_N = row_size(level_N, BITS, GROUP_SIZE)
        row_ptrs_N = row_ptr + marked_places(size_N, mark_ptr, n, is_row_N, BLOCK_N)
    else:
        row_ptrs_N, level_N = row_ptr + n * row_bytes, n * 0 + rank
    return row_ptrs_N, level_N


@triton.jit
def row_size(rank_N, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Bytes of rows without a plan, as :meth:`lowrank_kv.stores.ranked_rows.RankedRows.row_bytes` has them."""
    if BITS >= 16:
        size_N = rank_N * (BITS // 8)
    else:
        codes_N = rank_N if BITS == 8 else (rank_N + 1) // 2
        size_N = 4 * groups_of(rank_N, GROUP_SIZE) + codes_N + codes_N % 2
    return size_N


@triton.jit
def groups_of(rank_N, GROUP_SIZE: tl.constexpr):
    """How many steps, and least values, rows of integers have."""
    return rank_N * 0 + 1 if GROUP_SIZE == 0 else (rank_N + GROUP_SIZE - 1) // GROUP_SIZE


@triton.jit
def row_scales(row_ptrs_N, is_row_N, BITS: tl.constexpr):
    """What the numbers of :func:`row_units` are still to be multiplied by, (N,) fp32."""
    return planned_scales(row_ptrs_N, is_row_N) if BITS == 0 else is_row_N.to(tl.float32)


@triton.jit
def row_units(
    row_ptrs_N, level_N, is_row_N, r_Y, rank, descriptor_ptr, table_ptr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIFFER: tl.constexpr,
):  # fmt: skip
    """The coefficients `r_Y` of rows that begin at these pointers, divided by their scales, (N, Y) fp32; 0 where a row has
    none. Levels are those of :func:`located_rows`, and `rank` the most coefficients of a row."""
    if BITS == 0:
        unit_NY = planned_units(row_ptrs_N, level_N, is_row_N, r_Y, rank, descriptor_ptr, table_ptr, DIFFER)
    else:
        is_coef_NY = is_row_N[:, None] & (r_Y[None, :] < level_N[:, None])
        if BITS == 32:
            ptrs_NY = row_ptrs_N.to(tl.pointer_type(tl.float32))[:, None] + r_Y[None, :]
            unit_NY = tl.load(ptrs_NY, mask=is_coef_NY, other=0.0)
        elif BITS == 16:
            unit_NY = bfloat16s(row_ptrs_N[:, None] + 2 * r_Y[None, :], is_coef_NY)
        else:
            unit_NY = integers(row_ptrs_N, level_N, is_row_N, is_coef_NY, r_Y, BITS, GROUP_SIZE)
    return unit_NY


@triton.jit
def integers(
    row_ptrs_N, rank_N, is_row_N, is_coef_NY, r_Y, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr
):  # fmt: skip
    """Coefficients of rows of integers, whose steps and least values stand before their codes, (N, Y) fp32."""
    groups_N = groups_of(rank_N, GROUP_SIZE)
    if GROUP_SIZE == 0:
        step_NY = bfloat16s(row_ptrs_N, is_row_N)[:, None]
        least_NY = bfloat16s(row_ptrs_N + 2, is_row_N)[:, None]
    else:
        step_ptrs_NY = row_ptrs_N[:, None] + 2 * (r_Y // GROUP_SIZE)[None, :]
        step_NY = bfloat16s(step_ptrs_NY, is_coef_NY)
        least_NY = bfloat16s(step_ptrs_NY + 2 * groups_N[:, None], is_coef_NY)
    code_ptrs_N = row_ptrs_N + 4 * groups_N
    if BITS == 8:
        code_NY = tl.load(code_ptrs_N[:, None] + r_Y[None, :], mask=is_coef_NY, other=0)
    else:
        # A byte holds the coefficients y and y + half of its row.
        half_N = (rank_N + 1) // 2
        is_high_NY = (r_Y[None, :] >= half_N[:, None]).to(tl.int32)
        byte_NY = r_Y[None, :] - half_N[:, None] * is_high_NY
        code_NY = tl.load(code_ptrs_N[:, None] + byte_NY, mask=is_coef_NY, other=0).to(tl.int32)
        code_NY = (code_NY >> (4 * is_high_NY)) & 15
    return tl.where(is_coef_NY, code_NY.to(tl.float32) * step_NY + least_NY, 0.0)


@triton.jit
def bfloat16s(byte_ptrs, mask):
    """bf16 numbers at even bytes, as fp32; 0 where masked. As integers, because the interpreter computes wrongly in bf16."""
    bits = tl.load(byte_ptrs.to(tl.pointer_type(tl.uint16)), mask=mask, other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
