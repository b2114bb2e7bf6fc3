"""Calling the compiled way of a few new tokens into a cache.

Shapes: B batch, G KV heads, T tokens, D head dim, C = G·D joint width, E rotary dims.
"""

import struct

import torch
from torch import Tensor

from lowrank.ops.native.library import lanes, library
from lowrank.ops.native.plain import CPU, plain

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
        batch * tokens <= MAX_TOKENS
        and key_BGTD.dtype == value_BGTD.dtype == torch.float32
        and key_BGTD.is_cpu
        and value_BGTD.is_cpu
        and library() is not None
        and groups * head_dim % lanes() == 0
    )


def encode(
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    key: SideWeights,
    value: SideWeights,
    *,
    rotated_by: tuple[Tensor, Tensor] | None,
    threshold: float,
    granularity: int,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Coefficients x·U and ranks of new tokens by their gates (DynaKV, equations 1, 5, 6 and 8).

    Args:
        key_BGTD: rotated keys, fp32; as are the values.
        key, value: how each is encoded.
        rotated_by: cos and sin, (B or 1, T, E), by which halves of the keys' first E dims were rotated and are turned back;
            None where keys are not rotated.
        threshold: τ; as many coefficients are kept as cumulative sums of the softmax exceed it.
        granularity: the ranks are rounded to its nearest multiple, at least one.

    Returns:
        (coefficients (B, T, C) fp32, ranks (B, T) int64) of the keys and of the values.
    """
    batch, groups, tokens, head_dim = key_BGTD.shape
    cos, sin = (None, None) if rotated_by is None else [plain(table) for table in rotated_by]
    encoded, packed = [], []
    for states_BGTD, weights in ((key_BGTD, key), (value_BGTD, value)):
        if states_BGTD.stride(3) != 1:
            states_BGTD = states_BGTD.contiguous()
        coef_BTC = torch.empty(batch, tokens, groups * head_dim, dtype=torch.float32, device=CPU)
        rank_BT = torch.empty(batch, tokens, dtype=torch.int64, device=CPU)
        encoded.append((coef_BTC, rank_BT, states_BGTD))
        strides = states_BGTD.stride()[:3]
        packed += (
            weights.members,
            _STATES.pack(states_BGTD.data_ptr(), *strides, coef_BTC.data_ptr(), rank_BT.data_ptr()),
        )
    packed.append(
        _REST.pack(
            0 if cos is None else cos.data_ptr(),
            0 if sin is None else sin.data_ptr(),
            0 if cos is None or cos.shape[0] == 1 else cos.stride(0),
            batch,
            tokens,
            groups,
            head_dim,
            0 if cos is None else cos.shape[2],
            torch.get_num_threads(),
            granularity,
            threshold,
        )
    )
    if library().encode(b"".join(packed)):
        raise MemoryError("no memory for the scratch space of compiled encoding")
    return encoded[0][:2], encoded[1][:2]


# The members of `struct side` (weights, then states and results) and the others of `struct encoding` in encode.c, in order.
_WEIGHTS, _STATES, _REST = struct.Struct("4q"), struct.Struct("6q"), struct.Struct("10qf")
