"""Calling the compiled way of a few new tokens into a cache.

Shapes: T tokens, C joint width.
"""

import struct

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
    states_TC: Tensor,
    basis_CC: Tensor,
    scale_C: Tensor,
    gate_CC: Tensor,
    gate_C: Tensor,
    *,
    threshold: float,
    granularity: int,
) -> tuple[Tensor, Tensor]:
    """Coefficients x·U and ranks of tokens by the gate softmax(x·U·diag(s)·W + b) (DynaKV, equations 1, 5, 6 and 8).

    Args:
        states_TC: fp32, as are the matrices.
        basis_CC, scale_C, gate_CC, gate_C: U, s, W, b.
        threshold: τ; as many coefficients are kept as cumulative sums of the softmax exceed it.
        granularity: the ranks are rounded to its nearest multiple, at least one.

    Returns:
        (T, C) fp32 and (T,) int64.
    """
    inputs = [tensor.contiguous() for tensor in (states_TC, basis_CC, scale_C, gate_CC, gate_C)]
    coef_TC, *scratch = torch.empty(3, *states_TC.shape)
    rank_T = torch.empty(len(coef_TC), dtype=torch.int64)
    addresses = [tensor.data_ptr() for tensor in (*inputs, coef_TC, *scratch, rank_T)]
    library().encode(_ENCODING.pack(*addresses, *coef_TC.shape, granularity, threshold))
    return coef_TC, rank_T


# The members of `struct encoding` in encode.c, in their order.
_ENCODING = struct.Struct("9q3qf")
