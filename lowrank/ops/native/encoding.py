"""Calling the compiled way of a few new tokens into a cache.

Shapes: T tokens, C joint width.
"""

import ctypes

import torch
from torch import Tensor

from lowrank.ops.native.library import lanes, library

# More tokens than this are a prompt, which torch's own products serve better.
MAX_TOKENS = 16


def encodes(states_TC: Tensor) -> bool:
    """Whether compiled code can encode such tokens: a few of them, in fp32 on a CPU, of whole vector registers."""
    return (
        states_TC.device.type == "cpu"
        and states_TC.dtype == torch.float32
        and states_TC.shape[0] <= MAX_TOKENS
        and library() is not None
        and states_TC.shape[1] % lanes() == 0
    )


def encode(
    states_TC: Tensor, basis_CC: Tensor, gate_CC: Tensor, gate_C: Tensor, *, threshold: float, granularity: int
) -> tuple[Tensor, Tensor]:
    """Coefficients x·U and ranks of tokens by the gate softmax(x·U·W + b) (DynaKV, equations 1, 5, 6 and 8).

    Args:
        states_TC: fp32, as are the matrices.
        basis_CC, gate_CC, gate_C: U, W, b.
        threshold: τ; as many coefficients are kept as cumulative sums of the softmax exceed it.
        granularity: the ranks are rounded to its nearest multiple, at least one.

    Returns:
        (T, C) fp32 and (T,) int64.
    """
    inputs = [tensor.detach().contiguous() for tensor in (states_TC, basis_CC, gate_CC, gate_C)]
    coef_TC, logit_TC = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])
    rank_T = torch.empty(len(coef_TC), dtype=torch.int64)
    addresses = [tensor.data_ptr() for tensor in (*inputs, coef_TC, logit_TC, rank_T)]
    library().encode(ctypes.byref(_Encoding(*addresses, *coef_TC.shape, granularity, threshold)))
    return coef_TC, rank_T


class _Encoding(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("state", "basis", "gate", "bias", "coef", "logit", "rank")],
        *[(name, ctypes.c_int64) for name in ("tokens", "width", "granularity")],
        ("threshold", ctypes.c_float),
    ]
