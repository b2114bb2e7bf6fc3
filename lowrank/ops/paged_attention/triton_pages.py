"""Reading pages within a kernel.

Shapes: N tokens of a tile, Y coefficients read at once: a granule, or half of one where a byte holds two.
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
