"""Bases chosen for the least increase in loss, rather than the least loss of energy.

Shapes: C width.
"""

import dataclasses

import torch
from torch import Tensor

from lowrank_kv.bases.rank_allocation import falling_means

# The exponent of the gradients' moment lies between weighing errors by energy only (0) and by the second-order estimate (1),
# which holds only near the uncompressed model. Chosen by the loss where it no longer holds (docs/log/gradient-start.md).
POWER = 0.5
DAMPING = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedBasis:
    """Coefficients x · U, rebuilt by V = U⁻¹; leading ones matter most.

    Attributes:
        basis_CC, inverse_CC: U, which is not orthogonal, and V; fp32.
        energy_C: second moment of each coefficient, fp32, falling.
        loss_C: estimated loss, in nats a token, that leaving a coefficient out adds where all later ones are left out too;
            fp32, on the CPU, made to fall (:func:`lowrank_kv.bases.rank_allocation.falling_means`).
    """

    basis_CC: Tensor
    inverse_CC: Tensor
    energy_C: Tensor
    loss_C: Tensor


def weighted_basis(
    moment_CC: Tensor, gradient_CC: Tensor, *, power: float = POWER, damping: float = DAMPING
) -> WeightedBasis:
    """The PCA of x W^½, with W the damped root of the gradients' moment, mapped back to the states.

    Of all bases of rank r its leading r columns minimize E[e W eᵀ] for the error e of rebuilt states. With the identity
    as W it is the PCA.

    Args:
        moment_CC: second moment of the states, any floating dtype.
        gradient_CC: second moment of the loss's gradients with regard to them
            (:func:`lowrank_kv.calibration.gradient_moments.gradient_moments`).
        power: of the gradients' moment that W is; 1 is the second-order estimate.
        damping: share of the mean weight that each direction gets on top.
    """
    moment_CC, gradient_CC = moment_CC.double(), gradient_CC.double()
    weight_C, direction_CC = torch.linalg.eigh(gradient_CC)
    weight_C = weight_C.clamp(min=0)
    # Directions in which no gradient was seen get a little weight, too. If all gradients are zero, all weights are equal.
    weight_C = (weight_C + damping * weight_C.mean().clamp(min=torch.finfo(torch.float64).tiny)) ** power
    weight_C = weight_C / weight_C.log().mean().exp()  # det 1: coefficients are of the states' size
    root_CC = (direction_CC * weight_C.sqrt()) @ direction_CC.T
    unroot_CC = (direction_CC / weight_C.sqrt()) @ direction_CC.T
    energy_C, vectors_CC = torch.linalg.eigh(root_CC @ moment_CC @ root_CC)
    energy_C, vectors_CC = energy_C.flip(0).clamp(min=0), vectors_CC.flip(1)
    inverse_CC = vectors_CC.T @ unroot_CC
    loss_C = energy_C * (inverse_CC @ gradient_CC * inverse_CC).sum(dim=1) / 2
    return WeightedBasis(
        basis_CC=(root_CC @ vectors_CC).float(),
        inverse_CC=inverse_CC.float(),
        energy_C=energy_C.float(),
        loss_C=falling_means(loss_C).float(),
    )
