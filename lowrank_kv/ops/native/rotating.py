"""The rotations of many tokens at once, in compiled code.

Shapes: B batch, T tokens, F pairs of a rotation.
"""

import torch
from torch import Tensor

from lowrank_kv.ops.native.library import CPU, contiguous_fp32, library
from lowrank_kv.ops.rotary_table import RotaryTable


def computes_angles(device: torch.device) -> bool:
    """Whether there is compiled code for tokens on a device."""
    return device.type == "cpu" and library() is not None


def angles(position_BT: Tensor, frequency_F: Tensor, scaling: float) -> RotaryTable:
    """scaling · cos and scaling · sin of position · frequency, which is rounded to fp32 first.

    Args:
        position_BT: int32, on the CPU.
        frequency_F: radians a token, at most a quarter turn.
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
        torch.get_num_threads(),
        cos_BTF.data_ptr(),
        sin_BTF.data_ptr(),
    )
    return RotaryTable(cos_BTF, sin_BTF)
