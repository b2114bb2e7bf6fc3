"""Reading pages within a kernel.

Shapes: N tokens of a tile, K granules of the width, Y coefficients read at once: a granule, or half of one where a byte
holds two.
"""

import triton
import triton.language as tl


@triton.jit
def load_codes(page_ptr, page, half, n, is_row_N, TOKENS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Coefficients, or codes, of rows n of a page, (N, Y); of two codes in a byte those of `half` 0 or 1. 0 for no row."""
    y = tl.arange(0, WIDTH)
    ptrs = page_ptr + page.to(tl.int64) * (TOKENS * WIDTH) + n[:, None] * WIDTH + y[None, :]
    code_NY = tl.load(ptrs, mask=is_row_N[:, None], other=0)
    if BITS == 4:
        code_NY = (code_NY.to(tl.int32) >> 4 * half) & 15
    return code_NY


@triton.jit
def load_page_numbers(tile_page_ptr, tile, GRANULES: tl.constexpr, BLOCK_K: tl.constexpr):
    """The pages of a tile's granules, (K,). All at once, before the loop over granules: a number that is read within it
    would be waited for before its page could be asked for, and no page would be asked for ahead."""
    k = tl.arange(0, BLOCK_K)
    return tl.load(tile_page_ptr + tile * GRANULES + k, mask=k < GRANULES, other=0)


@triton.jit
def page_number(page_K, granule, BLOCK_K: tl.constexpr):
    """One of :func:`load_page_numbers`."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_K) == granule, page_K, 0), 0)
