"""Shared by the kernels that rebuild keys, rotate them by the angles of their positions and multiply them with queries.

A key is rebuilt in two halves, so that the dims of a rotated pair meet in one register: with the pair (a, b) of a key and
the angle of its position, (a cos − b sin, b cos + a sin). No rebuilt key leaves the program.

Shapes: M rows of queries that share a KV head, N tokens of a tile, D head dim, F = D/2 (room for them), E rotary dims,
Y coefficients that are read together.
"""

import triton
import triton.language as tl


@triton.jit
def pairs(f, HALF: tl.constexpr, ROTARY_HALF: tl.constexpr):
    """The dims that the pairs f are made of."""
    # Dims that are not rotated are paired as well: (j + E/2, j + D/2) for the j from E/2 to D/2.
    if ROTARY_HALF == HALF:
        first_F, second_F = f, f + HALF
    else:
        first_F = tl.where(f < ROTARY_HALF, f, f + ROTARY_HALF)
        second_F = tl.where(f < ROTARY_HALF, f + ROTARY_HALF, f + HALF)
    return first_F, second_F


@triton.jit
def add_rebuilt(half_NF, coef_NY, decoder_ptrs_YF, is_decoder_YF):
    """Halves of keys, fp32, with what coefficients add to them; multiplied in the coefficients' dtype."""
    decoder_YF = tl.load(decoder_ptrs_YF, mask=is_decoder_YF, other=0.0)
    return tl.dot(coef_NY, decoder_YF.to(coef_NY.dtype), half_NF, input_precision="ieee")


@triton.jit
def angles(cos_ptr, sin_ptr, table_row_N, is_row_N, f, ROTARY_HALF: tl.constexpr):
    """Each token's cos and sin, (N, F) fp32, which begin at `table_row_N`.

    All KV heads have the same. Kept from one to the next, they take as many registers as the key itself.
    """
    table_NF = table_row_N[:, None] + f[None, :]
    is_rotated_NF = is_row_N[:, None] & (f < ROTARY_HALF)[None, :]
    cos_NF = tl.load(cos_ptr + table_NF, mask=is_rotated_NF, other=1.0).to(tl.float32)
    sin_NF = tl.load(sin_ptr + table_NF, mask=is_rotated_NF, other=0.0).to(tl.float32)
    return cos_NF, sin_NF


@triton.jit
def rotated(first_NF, second_NF, cos_NF, sin_NF):
    """The halves of keys, rotated."""
    return first_NF * cos_NF - second_NF * sin_NF, second_NF * cos_NF + first_NF * sin_NF


@triton.jit
def query_halves(query_ptr, row_M, is_row_M, f, HALF: tl.constexpr, ROTARY_HALF: tl.constexpr, COMPUTE: tl.constexpr):
    """The halves of queries, (F, M) each: `row_M` of the rows (M, D) that `query_ptr` points to."""
    first_F, second_F = pairs(f, HALF, ROTARY_HALF)
    is_query_FM = (f < HALF)[:, None] & is_row_M[None, :]
    query_ptrs = query_ptr + row_M[None, :] * (2 * HALF)
    first_FM = tl.load(query_ptrs + first_F[:, None], mask=is_query_FM, other=0.0).to(COMPUTE)
    second_FM = tl.load(query_ptrs + second_F[:, None], mask=is_query_FM, other=0.0).to(COMPUTE)
    return first_FM, second_FM


@triton.jit
def scores_of_halves(first_NF, second_NF, first_FM, second_FM):
    """Products of rotated keys with queries, (N, M) fp32."""
    score_NM = tl.dot(first_NF.to(first_FM.dtype), first_FM, input_precision="ieee")
    return tl.dot(second_NF.to(second_FM.dtype), second_FM, score_NM, input_precision="ieee")
