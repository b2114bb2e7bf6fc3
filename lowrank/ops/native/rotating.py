"""The rotations of many tokens at once, in compiled code.

Shapes: B batch, T tokens, F pairs of a rotation.
"""

import torch
from torch import Tensor

from lowrank.ops.native.library import library
from lowrank.ops.native.plain import CPU, plain


def computes_angles(device: torch.device) -> bool:
    """Whether there is compiled code for tokens on a device."""
    return device.type == "cpu" and library() is not None


def angles(position_BT: Tensor, frequency_F: Tensor, scaling: float) -> Tensor:
    """scaling · (cos + i·sin) of position · frequency, which is rounded to fp32 first, (B, T, F) complex64.

    Args:
        position_BT: int32, on the CPU.
        frequency_F: radians a token, at most a quarter turn.
    """
    position_BT, frequency_F = position_BT.contiguous(), plain(frequency_F)
    angle_BTF = torch.empty(*position_BT.shape, len(frequency_F), dtype=torch.complex64, device=CPU)
    library().angles(
        position_BT.data_ptr(),
        position_BT.numel(),
        frequency_F.data_ptr(),
        len(frequency_F),
        scaling,
        torch.get_num_threads(),
        angle_BTF.data_ptr(),
    )
    return angle_BTF
