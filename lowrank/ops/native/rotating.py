"""The rotations of many tokens at once, in compiled code.

Shapes: T tokens, F pairs of a rotation.
"""

import torch
from torch import Tensor

from lowrank.ops.native.library import library
from lowrank.ops.native.plain import CPU, plain


def rotates(device: torch.device) -> bool:
    """Whether there is compiled code for tokens on a device."""
    return device.type == "cpu" and library() is not None


def angles(position_T: Tensor, frequency_F: Tensor, scaling: float) -> Tensor:
    """scaling · (cos + i·sin) of position · frequency, which is rounded to fp32 first, (T, F) complex64.

    Args:
        position_T: int32, on the CPU.
        frequency_F: radians a token.
    """
    position_T, frequency_F = position_T.contiguous(), plain(frequency_F)
    angle_TF = torch.empty(*position_T.shape, len(frequency_F), dtype=torch.complex64, device=CPU)
    library().angles(
        position_T.data_ptr(),
        position_T.numel(),
        frequency_F.data_ptr(),
        len(frequency_F),
        scaling,
        torch.get_num_threads(),
        angle_TF.data_ptr(),
    )
    return angle_TF
