"""What stands for the loss where no gradients are taken: the energy of states.

Shapes: C width of a row, P parts of it, each a layer's keys or its values, W width of a part.
"""

import torch
from torch import Tensor


def relative_weights(state_CC: Tensor, width: int) -> Tensor:
    """What the squared error of each number counts where a loss is the error of what is rebuilt over the energy of each
    layer's keys, and of its values; (C,).

    Args:
        state_CC: second moment of the rows.
        width: W, how many numbers are one layer's keys, or its values.
    """
    energy_PW = state_CC.diagonal().unflatten(0, (-1, width))
    least = torch.finfo(torch.float32).tiny
    return energy_PW.sum(1, keepdim=True).clamp(min=least).reciprocal().expand_as(energy_PW).flatten()
