"""Rotations for compiled code: cosines and sines computed by it, and passed to it.

Shapes: B batch, T tokens, F pairs of a rotation, E = 2·F rotary dims.
"""

import struct

import torch
from torch import Tensor

from lowrank_kv.ops.native.library import CPU, contiguous_fp32, library
from lowrank_kv.ops.native.store_view import NOTHING

# The members that describe a rotation, in their order: in `struct task` of task.h, and in `struct encoding` of encode.c.
ATTEND_ROTARY, ENCODE_ROTARY = struct.Struct("4q"), struct.Struct("4q")
_SLOW = 1 / 300  # radians a position, as in slow.h


class PackedRotary:
    """Cosines and sines as compiled code reads them.

    Args:
        cos_BTX, sin_BTX: for each pair (X = F) where attention rotates keys, for each dim (X = E) where encoding undoes a
            rotation; B is 1 where all sequences agree.
        slow_from: see :class:`lowrank_kv.ops.rotation.RotaryTable`.
    """

    def __init__(self, cos_BTX: Tensor, sin_BTX: Tensor, slow_from: int | None = None):
        cos, sin = contiguous_fp32(cos_BTX), contiguous_fp32(sin_BTX)
        self._keepalive = cos, sin  # their addresses follow
        batch, _, size = cos.shape
        self.for_attend = ATTEND_ROTARY.pack(
            cos.data_ptr(), sin.data_ptr(), size, size if slow_from is None else slow_from
        )
        self.for_encode = ENCODE_ROTARY.pack(cos.data_ptr(), sin.data_ptr(), 0 if batch == 1 else cos.stride(0), size)

    def __reduce__(self) -> tuple:
        return NOTHING


def computes_cos_sin(device: torch.device) -> bool:
    """Whether there is compiled code for :func:`cos_sin` of positions on a device."""
    return device.type == "cpu" and library() is not None


def slow_from(frequency_F: Tensor) -> int:
    """The first of the pairs from which on all turn so little from a position to the next that compiled code may interpolate
    between positions; F where there is none. Frequencies in radians a position."""
    fast_N = (frequency_F.abs() > _SLOW).nonzero()
    return int(fast_N[-1]) + 1 if len(fast_N) else 0


def cos_sin(
    position_BT: Tensor, frequency_F: Tensor, scaling: float, *, rounds_to_bf16: bool = False
) -> tuple[Tensor, Tensor]:
    """scaling · cos and scaling · sin of position · frequency, a product that is rounded to fp32 first.

    Args:
        position_BT: int32, on the CPU.
        frequency_F: radians a token, at most π/2.
        rounds_to_bf16: whether results are rounded to bf16, as a model in it rounds them.

    Returns:
        (B, T, F) each, fp32.
    """
    position_BT, frequency_F = position_BT.contiguous(), contiguous_fp32(frequency_F)
    shape = *position_BT.shape, len(frequency_F)
    cos_BTF, sin_BTF = (torch.empty(shape, dtype=torch.float32, device=CPU) for _ in range(2))
    library().angles(
        position_BT.data_ptr(),
        position_BT.numel(),
        frequency_F.data_ptr(),
        len(frequency_F),
        scaling,
        rounds_to_bf16,
        torch.get_num_threads(),
        cos_BTF.data_ptr(),
        sin_BTF.data_ptr(),
    )
    return cos_BTF, sin_BTF
