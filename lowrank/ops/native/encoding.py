"""Calling the compiled way of a few new tokens into a cache.

Shapes: B batch, G KV heads, T tokens, D head dim, C = G·D joint width, E rotary dims.
"""

import struct

import torch
from torch import Tensor

from lowrank.ops.native.library import lanes, library

# More tokens than this are a prompt, which torch's own products serve better.
MAX_TOKENS = 16


class SideWeights:
    """What encodes keys, or values; the tensors must not move while this is in use.

    Args:
        basis_CC, scale_C, gate_CC, gate_C: U, s, W and b of the gate softmax(x·U·diag(s)·W + b), contiguous fp32 on the CPU.
    """

    def __init__(self, basis_CC: Tensor, scale_C: Tensor, gate_CC: Tensor, gate_C: Tensor):
        self._tensors = basis_CC, scale_C, gate_CC, gate_C  # kept alive: addresses in them follow
        self.members = _WEIGHTS.pack(*(tensor.data_ptr() for tensor in self._tensors))

    def __reduce__(self) -> tuple:
        # A copy has addresses of its own.
        return SideWeights, self._tensors


def encodes(key_BGTD: Tensor, value_BGTD: Tensor) -> bool:
    """Whether compiled code can encode such keys and values: a few tokens, in fp32 on a CPU, of whole vector registers."""
    batch, groups, tokens, head_dim = key_BGTD.shape
    return (
        all(each.device.type == "cpu" and each.dtype == torch.float32 for each in (key_BGTD, value_BGTD))
        and batch * tokens <= MAX_TOKENS
        and library() is not None
        and groups * head_dim % lanes() == 0
    )


def encode(
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    key: SideWeights,
    value: SideWeights,
    *,
    turn_back: tuple[Tensor, Tensor] | None,
    threshold: float,
    granularity: int,
) -> tuple[Tensor, Tensor]:
    """Coefficients x·U and ranks of new tokens by their gates (DynaKV, equations 1, 5, 6 and 8).

    Args:
        key_BGTD: rotated keys, fp32, D contiguous; as are the values.
        key, value: how each is encoded.
        turn_back: cos and sin, (B or 1, T, E) fp32, that rotate halves of the keys' first E dims back; None where keys are
            not rotated.
        threshold: τ; as many coefficients are kept as cumulative sums of the softmax exceed it.
        granularity: the ranks are rounded to its nearest multiple, at least one.

    Returns:
        coefficients of (keys, values), (2, B, T, C) fp32, and ranks, (2, B, T) int64.
    """
    batch, groups, tokens, head_dim = key_BGTD.shape
    width = groups * head_dim
    states = [states.contiguous() if states.stride(3) != 1 else states for states in (key_BGTD, value_BGTD)]
    cos, sin = (None, None) if turn_back is None else (table.contiguous() for table in turn_back)
    coef_2BTC = torch.empty(2, batch, tokens, width)
    scratch = torch.empty(4, batch, tokens, width)
    rank_2BT = torch.empty(2, batch, tokens, dtype=torch.int64)
    task = b"".join(
        [
            key.members,
            _STATES.pack(states[0].data_ptr(), *states[0].stride()[:3]),
            value.members,
            _STATES.pack(states[1].data_ptr(), *states[1].stride()[:3]),
            _REST.pack(
                0 if cos is None else cos.data_ptr(),
                0 if sin is None else sin.data_ptr(),
                coef_2BTC.data_ptr(),
                rank_2BT.data_ptr(),
                scratch.data_ptr(),
                0 if cos is None or cos.shape[0] == 1 else cos.stride(0),
                batch,
                tokens,
                groups,
                head_dim,
                0 if cos is None else cos.shape[2],
                torch.get_num_threads(),
                granularity,
                threshold,
            ),
        ]
    )
    library().encode(task)
    return coef_2BTC, rank_2BT


# The members of `struct side` (weights and states) and the others of `struct encoding` in encode.c, in their order.
_WEIGHTS, _STATES, _REST = struct.Struct("4q"), struct.Struct("4q"), struct.Struct("13qf")
