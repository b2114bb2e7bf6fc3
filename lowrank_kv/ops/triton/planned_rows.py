"""Shared by the kernels that read rows packed by a plan of bits (:mod:`lowrank_kv.stores.bit_plan`).

Shapes: N tokens of a tile, Y coefficients that are read together.
"""

import triton
import triton.language as tl


@triton.jit
def planned_scales(row_ptrs_N, is_row_N):
    """The scales of rows that begin at these pointers, fp32."""
    return tl.exp2((tl.load(row_ptrs_N, mask=is_row_N, other=0).to(tl.float32) - 128.0) / 8.0)


@triton.jit
def planned_units(row_ptrs_N, is_row_N, r_Y, rank, descriptor_ptr, table_ptr):
    """The coefficients `r_Y` of rows that begin at these pointers, divided by their scales, (N, Y) fp32; 0 beyond the rank.

    `descriptor_ptr` points to (3, rank) int32 (:attr:`lowrank_kv.stores.bit_plan.BitPlan.descriptor_3R`).
    """
    is_coef_Y = r_Y < rank
    start_Y = tl.load(descriptor_ptr + r_Y, mask=is_coef_Y, other=0)
    mask_Y = tl.load(descriptor_ptr + rank + r_Y, mask=is_coef_Y, other=0)
    first_Y = tl.load(descriptor_ptr + 2 * rank + r_Y, mask=is_coef_Y, other=0)
    shift_Y = start_Y & 7
    byte_ptrs_NY = row_ptrs_N[:, None] + (start_Y >> 3)[None, :]
    is_code_NY = is_row_N[:, None] & is_coef_Y[None, :]
    # The byte after a row's last one is another row's, or nobody's.
    is_split_Y = (mask_Y << shift_Y) > 255
    low_NY = tl.load(byte_ptrs_NY, mask=is_code_NY, other=0).to(tl.int32)
    high_NY = tl.load(byte_ptrs_NY + 1, mask=is_code_NY & is_split_Y[None, :], other=0).to(tl.int32)
    code_NY = ((low_NY | (high_NY << 8)) >> shift_Y[None, :]) & mask_Y[None, :]
    is_coded_NY = is_code_NY & (first_Y >= 0)[None, :]
    level_NY = tl.load(table_ptr + first_Y[None, :] + code_NY, mask=is_coded_NY, other=0.0)
    return tl.where((first_Y < 0)[None, :], (code_NY << 16).to(tl.float32, bitcast=True), level_NY)
