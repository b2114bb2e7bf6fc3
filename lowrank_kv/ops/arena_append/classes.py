"""The class of plans that each token asks for, in Triton: :meth:`lowrank_kv.stores.token_plans.TokenPlans.classes`.

Sums are fp64, as in compiled C: their order can only matter where a score is within an fp64 rounding of a bound.

Shapes: T new tokens, N of a program, C coefficients of the gate, K − 1 bounds
between classes.
"""

import triton
import triton.language as tl

from lowrank_kv.stores import importance_gate

_LARGEST_SQUARE = tl.constexpr(importance_gate.LARGEST_SQUARE)
_LEAST_ENERGY = tl.constexpr(importance_gate.LEAST_SCALE**2)


@triton.jit(do_not_specialize=["tokens"])
def ask_classes(
    coef_ptr,
    slot_ptr,
    linear_ptr,
    square_ptr,
    rest_ptr,
    bound_ptr,
    asked_ptr,
    tokens,
    coef_stride,
    leading,
    bounds,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Into `asked_ptr`, (T,) int32; only for tokens that have a place."""
    t_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_place_N = tl.load(slot_ptr + t_N, mask=t_N < tokens, other=-1) >= 0
    c = tl.arange(0, BLOCK_C)
    is_width_C = c < WIDTH
    is_coef_NC = has_place_N[:, None] & is_width_C[None, :]
    coef_NC = tl.load(coef_ptr + t_N[:, None] * coef_stride + c[None, :], mask=is_coef_NC, other=0.0)
    wide_NC = tl.where((c < leading)[None, :], coef_NC, 0.0).to(tl.float64)
    energy_N = tl.sum(wide_NC * wide_NC, 1) / leading
    energy_N = tl.where(energy_N > _LEAST_ENERGY, energy_N, _LEAST_ENERGY)
    scale_N = tl.sqrt(energy_N).to(tl.float32)
    unit_NC = tl.div_rn(coef_NC, tl.broadcast_to(scale_N[:, None], (BLOCK_N, BLOCK_C)))
    square_NC = unit_NC * unit_NC
    square_NC = tl.where(square_NC < _LARGEST_SQUARE, square_NC, _LARGEST_SQUARE)
    linear_C = tl.load(linear_ptr + c, mask=is_width_C, other=0.0).to(tl.float64)
    weight_C = tl.load(square_ptr + c, mask=is_width_C, other=0.0).to(tl.float64)
    score_N = tl.sum(unit_NC.to(tl.float64) * linear_C[None, :] + square_NC.to(tl.float64) * weight_C[None, :], 1)
    size_N = tl.log(energy_N)
    score_N += tl.load(rest_ptr).to(tl.float64) * size_N + tl.load(rest_ptr + 1).to(tl.float64) * size_N * size_N
    score_N += tl.load(rest_ptr + 2).to(tl.float64)
    k = tl.arange(0, BLOCK_K)
    bound_K = tl.load(bound_ptr + k, mask=k < bounds, other=float("inf"))
    is_above_NK = (k < bounds)[None, :] & ((score_N.to(tl.float32)[:, None] <= bound_K[None, :]) == 0)
    tl.store(asked_ptr + t_N, tl.sum(is_above_NK.to(tl.int32), 1), mask=has_place_N)
