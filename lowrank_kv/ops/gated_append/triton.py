"""Project, gate, threshold and pack one token of each sequence in one launch, in Triton.

Every program multiplies some sequences' tokens with some columns of the joined matrix; the last to finish for those
sequences then has all their coefficients and logits, and does the rest. So nothing waits for another program, and
the matrix is read by as many multiprocessors as it has column blocks.

Shapes: B batch, C joint width, X = 2C, K granules of the width, N tokens of a tile, Y coefficients of a granule, or half of
them where two share a byte. In the kernel B is a block of the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_kv.ops.triton.launch import computing_type
from lowrank_kv.ops.triton.rounding import integer_codes, integer_scales
from lowrank_kv.stores.paged import PagedStore
from lowrank_kv.utils.config import require

_BLOCK_BATCH = 16


@triton.jit
def _gated_append(
    state_ptr,
    weight_ptr,
    bias_ptr,
    product_ptr,
    arrived_ptr,
    page_ptr,
    free_ptr,
    free_count_ptr,
    length_ptr,
    tiles_ptr,
    tile_page_ptr,
    tile_granules_ptr,
    tile_rows_ptr,
    position_ptr,
    scale_ptr,
    open_ptr,
    batch,
    slots,
    threshold,
    granularity,
    WIDTH: tl.constexpr,
    GRANULE: tl.constexpr,
    GRANULES: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE_WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    column_block, batch_block = tl.program_id(0), tl.program_id(1)
    b = (batch_block * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    is_row_B = b < batch
    x = column_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    product_BX = tl.zeros((BLOCK_B, BLOCK_OUT), tl.float32)
    for start in range(0, WIDTH, BLOCK_IN):
        i = start + tl.arange(0, BLOCK_IN)
        is_in_I = i < WIDTH
        state_BI = tl.load(
            state_ptr + b[:, None] * WIDTH + i[None, :], mask=is_row_B[:, None] & is_in_I[None, :], other=0
        )
        weight_IX = tl.load(
            weight_ptr + i[:, None] * (2 * WIDTH) + x[None, :],
            mask=is_in_I[:, None] & (x < 2 * WIDTH)[None, :],
            other=0,
        )
        product_BX = tl.dot(state_BI.to(COMPUTE), weight_IX.to(COMPUTE), product_BX, input_precision="ieee")
    product_ptrs = product_ptr + b[:, None] * (2 * WIDTH) + x[None, :]
    tl.store(product_ptrs, product_BX, mask=is_row_B[:, None] & (x < 2 * WIDTH)[None, :])
    # All threads' stores come before the arrival, and the arrival before what its last program loads.
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr + batch_block, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.debug_barrier()
        c = tl.arange(0, BLOCK_C)
        is_column_C = c < WIDTH
        is_BC = is_row_B[:, None] & is_column_C[None, :]
        row_ptrs = product_ptr + b[:, None] * (2 * WIDTH)
        # Past the first-level cache, which other multiprocessors do not write to.
        logit_BC = tl.load(row_ptrs + WIDTH + c[None, :], mask=is_BC, other=float("-inf"), cache_modifier=".cg")
        logit_BC += tl.load(bias_ptr + c, mask=is_column_C, other=0.0).to(tl.float32)[None, :]
        logit_BC = tl.where(is_BC, logit_BC, tl.where(is_row_B, float("-inf"), 0.0)[:, None])
        chance_BC = tl.exp(logit_BC - tl.max(logit_BC, 1)[:, None])
        cumulative_BC = tl.cumsum(chance_BC / tl.sum(chance_BC, 1)[:, None], 1)
        rank_B = tl.sum(((cumulative_BC > threshold) & is_column_C[None, :]).to(tl.int32), 1)
        rank_B = (rank_B + granularity // 2) // granularity * granularity
        rank_B = tl.minimum(tl.maximum(rank_B, tl.minimum(granularity, WIDTH)), WIDTH)
        granules_B = rank_B // GRANULE

        open_ptrs = open_ptr + b * (GRANULES + 1) + granules_B
        open_B = tl.load(open_ptrs, mask=is_row_B, other=-1)
        filled_B = tl.load(tile_rows_ptr + b * slots + open_B, mask=is_row_B & (open_B >= 0), other=TOKENS)
        is_fresh_B = is_row_B & (filled_B == TOKENS)
        tiles_B = tl.load(tiles_ptr + b, mask=is_row_B, other=0)
        length_B = tl.load(length_ptr + b, mask=is_row_B, other=0)
        slot_B = tl.where(is_fresh_B, tiles_B, open_B)
        row_B = tl.where(is_fresh_B, 0, filled_B)
        tile_B = b * slots + slot_B

        wanted_B = tl.where(is_fresh_B, granules_B, 0)
        free = tl.atomic_add(free_count_ptr, -tl.sum(wanted_B, 0))
        first_B = free - tl.cumsum(wanted_B, 0)

        if BITS < 16:
            is_kept_BC = is_BC & (c[None, :] < rank_B[:, None])
            coef_BC = tl.load(row_ptrs + c[None, :], mask=is_kept_BC, other=0.0, cache_modifier=".cg")
            coef_BC = coef_BC.to(state_ptr.dtype.element_ty).to(tl.float32)
            low_B = tl.where(is_row_B, tl.min(tl.where(is_kept_BC, coef_BC, float("inf")), 1), 0.0)
            high_B = tl.where(is_row_B, tl.max(tl.where(is_kept_BC, coef_BC, float("-inf")), 1), 0.0)
            step_B, least_B = integer_scales(low_B, high_B, BITS)
            scale_ptrs = scale_ptr + (tile_B * TOKENS + row_B) * 2
            tl.store(scale_ptrs, step_B.to(tl.bfloat16), mask=is_row_B)
            tl.store(scale_ptrs + 1, least_B.to(tl.bfloat16), mask=is_row_B)

        y = tl.arange(0, PAGE_WIDTH)
        for granule in range(GRANULES):
            has_page_B = is_row_B & (granule < granules_B)
            tile_page_ptrs = tile_page_ptr + tile_B * GRANULES + granule
            page_B = tl.load(free_ptr + first_B + granule, mask=has_page_B & is_fresh_B, other=0)
            tl.store(tile_page_ptrs, page_B, mask=has_page_B & is_fresh_B)
            held_B = tl.load(tile_page_ptrs, mask=has_page_B & (is_fresh_B == 0), other=0)
            page_B = tl.where(is_fresh_B, page_B, held_B).to(tl.int64)
            coef_ptrs = row_ptrs + granule * GRANULE + y[None, :]
            coef_BY = tl.load(coef_ptrs, mask=has_page_B[:, None], other=0.0, cache_modifier=".cg")
            coef_BY = coef_BY.to(state_ptr.dtype.element_ty)
            if BITS < 16:
                coef_BY = integer_codes(coef_BY.to(tl.float32), step_B[:, None], least_B[:, None], BITS)
            if BITS == 4:
                high_BY = tl.load(coef_ptrs + PAGE_WIDTH, mask=has_page_B[:, None], other=0.0, cache_modifier=".cg")
                high_BY = high_BY.to(state_ptr.dtype.element_ty).to(tl.float32)
                coef_BY = coef_BY | (integer_codes(high_BY, step_B[:, None], least_B[:, None], BITS) << 4)
            page_ptrs = page_ptr + (page_B * TOKENS + row_B)[:, None] * PAGE_WIDTH + y[None, :]
            tl.store(page_ptrs, coef_BY.to(page_ptr.dtype.element_ty), mask=has_page_B[:, None])

        tl.store(position_ptr + tile_B * TOKENS + row_B, length_B, mask=is_row_B)
        tl.store(tile_rows_ptr + tile_B, row_B + 1, mask=is_row_B)
        tl.store(tile_granules_ptr + tile_B, granules_B, mask=is_fresh_B)
        tl.store(open_ptrs, slot_B, mask=is_row_B)
        tl.store(tiles_ptr + b, tiles_B + 1, mask=is_fresh_B)
        tl.store(length_ptr + b, length_B + 1, mask=is_row_B)


def gated_append(
    state_BC: Tensor, weight_CX: Tensor, bias_C: Tensor, store: PagedStore, *, threshold: float, granularity: int
) -> None:
    """One token of each sequence into the store at its own rank (DynaKV, section 3.2), without a word from the host.

    The caller makes sure that no sequence is at the store's `capacity` and reserves pages (:meth:`PagePool.reserve`); a CUDA
    graph can record only the launch.

    Args:
        state_BC: joint keys before rotation, or values, in the dtype coefficients are rounded to.
        weight_CX: what :func:`lowrank_kv.ops.gated_append.weights.append_weights` made, in the same dtype.
        bias_C: b of the gate.
        store: of B sequences.
        threshold: τ of equation 8.
        granularity: ranks are rounded to the nearest multiple of it, itself a multiple of the pool's granule.

    Raises:
        UserError: granularity is not whole granules.
    """
    pool = store.pool
    require(
        granularity % pool.granule == 0,
        "granularity",
        granularity,
        f"a multiple of the pages' granule, {pool.granule}",
    )
    batch, width = state_BC.shape
    batch_blocks = triton.cdiv(batch, _BLOCK_BATCH)
    product_BX = torch.empty(batch, 2 * width, dtype=torch.float32, device=state_BC.device)
    arrived = torch.zeros(batch_blocks, dtype=torch.int32, device=state_BC.device)
    block_out = 32
    _gated_append[triton.cdiv(2 * width, block_out), batch_blocks](
        state_BC.contiguous(),
        weight_CX,
        bias_C,
        product_BX,
        arrived,
        pool.page_PNY,
        pool.free_P,
        pool.free_count,
        store.length_B,
        store.tiles_B,
        store.tile_page_BSK,
        store.tile_granules_BS,
        store.tile_rows_BS,
        store.tile_position_BSN,
        store.tile_scale_BSN2,
        store.open_BK,
        batch,
        store.slots,
        threshold,
        granularity,
        WIDTH=width,
        GRANULE=pool.granule,
        GRANULES=store.granules,
        TOKENS=pool.tokens,
        PAGE_WIDTH=pool.page_PNY.shape[2],
        BITS=pool.bits,
        COMPUTE=computing_type(state_BC.dtype),
        BLOCK_B=_BLOCK_BATCH,
        BLOCK_IN=min(128, triton.next_power_of_2(width)),
        BLOCK_OUT=block_out,
        BLOCK_C=triton.next_power_of_2(width),
        num_warps=8,
        num_stages=3,
    )
