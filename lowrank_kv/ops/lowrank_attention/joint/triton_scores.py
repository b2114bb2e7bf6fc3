"""Scores of joint keys of one rank, rebuilt and rotated within the kernel.

A program rebuilds a run of tokens, one KV head after another (:mod:`lowrank_kv.ops.triton.rebuild_keys`), and writes
their scores, all heads of a token side by side. With several heads it keeps their positions' angles, which all share.

Shapes: B batch, G KV heads, M rows of queries that share one, P = G·M, Q queries, D head dim, F = D/2, C = G·D, N tokens
(room for them), R rank, Y bytes or numbers of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowrank_kv.ops.lowrank_attention.latent_rows import LatentRows
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.triton.integer_rows import load_scales
from lowrank_kv.ops.triton.launch import block, computing_type, first_strides, sequence_stride, tuned, tuning_class
from lowrank_kv.ops.triton.planned_rows import planned_rows, planned_scales, planned_units
from lowrank_kv.ops.triton.rebuild_keys import add_rebuilt, angles, pairs, query_halves, rotated, scores_of_halves
from lowrank_kv.ops.triton.scores_by_position import store_scores


@triton.jit(do_not_specialize=["tuning_class", "room", "mask_stride_b", "mask_stride_q"])
def _scores_kernel(
    query_ptr,
    basis_ptr,
    row_ptr,
    scale_ptr,
    descriptor_ptr,
    table_ptr,
    class_ptr,
    mark_ptr,
    size_ptr,
    length_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    mask_ptr,
    score_ptr,
    tuning_class,
    room,
    rank,
    basis_stride_b,
    basis_stride_r,
    row_stride_b,
    row_stride_n,
    scale_stride_b,
    scale_stride_n,
    table_stride_b,
    table_stride_t,
    position_stride_b,
    mask_stride_b,
    mask_stride_q,
    scaling,
    softcap,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    BITS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    GROUPS_EACH: tl.constexpr,
):
    start, first_group, b = tl.program_id(0) * BLOCK_N, tl.program_id(1) * GROUPS_EACH, tl.program_id(2).to(tl.int64)
    length = tl.load(length_ptr + b)
    if start < length:
        n, y = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_Y)
        m, f = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_F)
        is_row_N, is_dim_F, is_row_M = n < length, f < HALF, m < ROWS
        table_row_N = n
        if cos_ptr is not None:
            position_N = n
            if position_ptr is not None:
                position_N = tl.load(position_ptr + b * position_stride_b + n, mask=is_row_N, other=0)
            table_row_N = b * table_stride_b + position_N * table_stride_t
        row_ptrs_N, class_N = planned_rows(
            row_ptr + b * row_stride_b, row_stride_n, class_ptr, mark_ptr, size_ptr, n, is_row_N, BLOCK_N
        )
        if BITS == 0:
            step_N = planned_scales(row_ptrs_N, is_row_N)
        elif BITS < 16:
            step_N, least_N = load_scales(scale_ptr + b * scale_stride_b + n * scale_stride_n, is_row_N)
        first_F, second_F = pairs(f, HALF, ROTARY_HALF)
        # With 4 bits a byte holds the coefficients y and y + half of its row.
        width = (rank + 1) // 2 if BITS == 4 else rank
        halves: tl.constexpr = 2 if BITS == 4 else 1
        row_ptrs = row_ptrs_N[:, None] + y[None, :]
        # Beside halves of more than 64 dims angles would spill, and are read anew for every KV head.
        is_kept: tl.constexpr = GROUPS_EACH > 1 and BLOCK_F <= 64
        if is_kept and cos_ptr is not None:
            cos_NF, sin_NF = angles(cos_ptr, sin_ptr, table_row_N, is_row_N, f, ROTARY_HALF)
        # Flattened, the loops ask for one head's chunks while the head before is multiplied.
        for group in tl.range(first_group, tl.minimum(first_group + GROUPS_EACH, GROUPS), flatten=is_kept):
            first_NF = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
            second_NF = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
            for chunk in range(0, width, BLOCK_Y):
                if BITS == 0:
                    code_NY = planned_units(
                        row_ptrs_N, class_N, is_row_N, chunk + y, rank, descriptor_ptr, table_ptr, class_ptr is not None
                    )
                else:
                    is_code_NY = is_row_N[:, None] & (chunk + y < width)[None, :]
                    code_NY = tl.load(row_ptrs + chunk, mask=is_code_NY, other=0)
                for half in tl.static_range(halves):
                    coef_NY = code_NY
                    if BITS == 4:
                        coef_NY = (code_NY >> 4 * half) & 15
                    if BITS == 0:
                        coef_NY = coef_NY * step_N[:, None]
                    elif BITS < 16:
                        coef_NY = coef_NY.to(tl.float32) * step_N[:, None] + least_N[:, None]
                    coef_NY = coef_NY.to(COMPUTE)
                    # A code beyond the rank is no coefficient: it meets zeros.
                    r_Y = half * width + chunk + y
                    is_basis_YF = ((chunk + y < width) & (r_Y < rank))[:, None] & is_dim_F[None, :]
                    basis_ptrs = basis_ptr + b * basis_stride_b + r_Y[:, None] * basis_stride_r + group * 2 * HALF
                    first_NF = add_rebuilt(first_NF, coef_NY, basis_ptrs + first_F[None, :], is_basis_YF)
                    second_NF = add_rebuilt(second_NF, coef_NY, basis_ptrs + second_F[None, :], is_basis_YF)
            row_M = group * ROWS + m
            if cos_ptr is not None:
                if not is_kept:
                    cos_NF, sin_NF = angles(cos_ptr, sin_ptr, table_row_N, is_row_N, f, ROTARY_HALF)
                first_NF, second_NF = rotated(first_NF, second_NF, cos_NF, sin_NF)
            first_FM, second_FM = query_halves(
                query_ptr + b * GROUPS * ROWS * 2 * HALF, row_M, is_row_M, f, HALF, ROTARY_HALF, COMPUTE
            )
            score_NM = scores_of_halves(first_NF, second_NF, first_FM, second_FM)
            store_scores(
                score_ptr, mask_ptr, score_NM, n, is_row_N, row_M, is_row_M, b, room, mask_stride_b, mask_stride_q,
                scaling, softcap, QUERIES, GROUPS * ROWS,
            )  # fmt: skip


# Not for every rank: water-filling gives each layer its own.
_TUNED_BY = ["GROUPS", "HALF", "BLOCK_M", "BITS", "tuning_class"]
_joint_scores = tuned(
    triton.Config({"BLOCK_N": 64, "BLOCK_Y": 64, "GROUPS_EACH": 1}, num_warps=8, num_stages=3),
    triton.Config({"BLOCK_N": 128, "BLOCK_Y": 64, "GROUPS_EACH": 1}, num_warps=8, num_stages=3),
    triton.Config({"BLOCK_N": 128, "BLOCK_Y": 64, "GROUPS_EACH": 8}, num_warps=8, num_stages=3),
    triton.Config({"BLOCK_N": 128, "BLOCK_Y": 64, "GROUPS_EACH": 4}, num_warps=8, num_stages=4),
    triton.Config({"BLOCK_N": 64, "BLOCK_Y": 64, "GROUPS_EACH": 8}, num_warps=8, num_stages=3),
    triton.Config({"BLOCK_N": 64, "BLOCK_Y": 64, "GROUPS_EACH": 8}, num_warps=4, num_stages=3),
    key=_TUNED_BY,
)(_scores_kernel)
# Places, codes and levels of planned coefficients fill registers: fewer are read at once.
_planned_scores = tuned(
    triton.Config({"BLOCK_N": 64, "BLOCK_Y": 16, "GROUPS_EACH": 1}, num_warps=8, num_stages=2),
    triton.Config({"BLOCK_N": 64, "BLOCK_Y": 32, "GROUPS_EACH": 1}, num_warps=8, num_stages=2),
    triton.Config({"BLOCK_N": 32, "BLOCK_Y": 32, "GROUPS_EACH": 1}, num_warps=4, num_stages=2),
    key=_TUNED_BY,
)(_scores_kernel)


def joint_scores(
    query_BGMD: Tensor,
    keys: LatentRows,
    length_B: Tensor,
    *,
    queries: int,
    scaling: float,
    rotation: RotaryTable | None,
    position_BN: Tensor | None,
    softcap: float | None,
    mask_BQN: Tensor | None,
) -> Tensor:
    """Scores times log2 e of all tokens, (B, N, P) fp32; -inf where masked, undefined beyond a sequence's length.

    Arguments as in :func:`lowrank_kv.ops.lowrank_attention.joint.triton.joint_attention`; `query_BGMD` is contiguous.
    """
    batch, groups, rows, head_dim = query_BGMD.shape
    row_BNY, plan = keys.row_BGNY[:, 0], keys.plan
    # Dims of a head side by side, whatever the rank, are read in wide loads; a QR leaves them so.
    basis_BCR = keys.basis_BGDR[:, 0].mT.contiguous().mT
    scale_BN2 = None if keys.scale_BGN2 is None else keys.scale_BGN2[:, 0]
    room = keys.room
    score_BNP = torch.empty(batch, room, groups * rows, dtype=torch.float32, device=query_BGMD.device)

    def grid(chosen: dict) -> tuple[int, int, int]:
        return triton.cdiv(room, chosen["BLOCK_N"]), triton.cdiv(groups, chosen["GROUPS_EACH"]), batch

    cos, sin = (None, None) if rotation is None else (rotation.cos_BTF, rotation.sin_BTF)
    kernel = _joint_scores if plan is None else _planned_scores
    kernel[grid](
        query_BGMD,
        basis_BCR,
        row_BNY,
        scale_BN2,
        *keys.plan_tensors(),
        length_B,
        cos,
        sin,
        position_BN,
        mask_BQN,
        score_BNP,
        tuning_class(room, keys.rank, row_BNY.stride(1), basis_BCR.stride(2)),
        room,
        keys.rank,
        sequence_stride(basis_BCR),
        basis_BCR.stride(2),
        *first_strides(row_BNY, 2),
        *first_strides(scale_BN2, 2),
        *first_strides(cos, 2),
        0 if position_BN is None else sequence_stride(position_BN),
        *first_strides(mask_BQN, 2),
        scaling,
        softcap,
        GROUPS=groups,
        ROWS=rows,
        QUERIES=queries,
        HALF=head_dim // 2,
        ROTARY_HALF=head_dim // 2 if cos is None else cos.shape[2],
        BITS=keys.bits,
        COMPUTE=computing_type(query_BGMD.dtype),
        BLOCK_M=block(rows),
        BLOCK_F=block(head_dim // 2),
    )
    return score_BNP
