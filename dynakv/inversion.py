"""The inverse of a matrix that has moved a little since it was inverted last, as a training step moves it.

Shapes: C width.
"""

import torch
from torch import Tensor

_STEPS = 6
# Of ‖I − U V‖ / √C (Frobenius), about what rounding leaves of an inverse in fp32.
_ROUNDING = 6e-7


@torch.no_grad()
def inverse_near(matrix_CC: Tensor, known_CC: Tensor) -> Tensor | None:
    """U⁻¹ by Newton's iteration V ← V + V (I − U V) (Schulz 1933), from the inverse V of a matrix near to U.

    Five to seven products of matrices in place of a factorization, which leaves most of a GPU idle.

    Args:
        matrix_CC: U, fp32.
        known_CC: what to start from, fp32.

    Returns:
        (C, C) fp32; None where U is too far from what `known_CC` inverts, or so ill-conditioned that ‖I − U V‖ does not fall
        to what rounding leaves.
    """
    identity_CC = torch.eye(len(matrix_CC), dtype=matrix_CC.dtype, device=matrix_CC.device)
    root = len(matrix_CC) ** 0.5
    inverse_CC, bound = known_CC, root
    for _ in range(_STEPS):
        residual_CC = identity_CC - matrix_CC @ inverse_CC
        error = float(residual_CC.norm())
        if error <= _ROUNDING * root:
            return inverse_CC
        # A step squares what is left; what does not even halve does not converge, and NaN is not smaller than anything.
        if not error < bound / 2:
            return None
        inverse_CC, bound = inverse_CC + inverse_CC @ residual_CC, error
    return None
