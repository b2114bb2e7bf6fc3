"""How well a basis represents a set of rows, and how far two bases agree.

Shapes: N rows, C width, R rank.
"""

import torch
from torch import Tensor


def relative_error(rows_NC: Tensor, basis_CR: Tensor) -> float:
    """RER = ‖X − X U Uᵀ‖² / ‖X‖² for an orthonormal basis U (residual-energy ratio; OjaKV, section 4).

    0 means that the basis spans every row, 1 that it spans none. Computed in fp64.
    """
    rows_NC, basis_CR = rows_NC.double(), basis_CR.double()
    residual_NC = rows_NC - rows_NC @ basis_CR @ basis_CR.T
    return float(residual_NC.square().sum() / rows_NC.square().sum())


def subspace_overlap(first_CR: Tensor, second_CR: Tensor) -> float:
    """SO(U₁, U₂) = tr(U₁ᵀU₂U₂ᵀU₁) / R for two orthonormal bases of equal rank: 1 when the spans agree, 0 when orthogonal."""
    if first_CR.shape != second_CR.shape:
        raise ValueError(f"bases must have equal shape, got {tuple(first_CR.shape)} and {tuple(second_CR.shape)}")
    product_RR = first_CR.double().T @ second_CR.double()
    return float(torch.linalg.matrix_norm(product_RR).square() / first_CR.shape[1])
