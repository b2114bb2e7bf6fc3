"""The learned projection into spectral space and its inverse (DynaKV, section 3.1).

Shapes: C joint width.
"""

import torch
from torch import Tensor, nn

from lowrank.errors import UserError

# Past this condition number, rounding U⁻¹ to bf16 costs more than the truncation saves.
MAX_CONDITION = 1e4


class Projection(nn.Module):
    """U of equation 1, started from a PCA basis and trained, and U⁻¹ of equation 3.

    ``exact`` learns U itself and inverts it. ``orthogonal`` learns U = U₀ · exp(A − Aᵀ), which stays orthogonal, so that
    the inverse is the transpose.
    """

    def __init__(self, width: int, *, inverse: str, name: str):
        super().__init__()
        self.name, self.inverse = name, inverse
        if inverse == "exact":
            self.weight = nn.Parameter(torch.eye(width))
        else:
            self.weight = nn.Parameter(torch.zeros(width, width))
            self.register_buffer("start", torch.eye(width))
        self._fixed: tuple | None = None

    @torch.no_grad()
    def initialise(self, vectors_CC: Tensor) -> None:
        """Start from an orthonormal basis."""
        if self.inverse == "exact":
            self.weight.copy_(vectors_CC)
        else:
            self.weight.zero_()
            self.start.copy_(vectors_CC)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """(U, U⁻¹), differentiable, in the parameters' dtype. Raises :class:`UserError` for a singular U."""
        if self.inverse == "orthogonal":
            basis_CC = _turned(self.start, self.weight)
            return basis_CC, basis_CC.T
        weight_CC = self.weight.float()
        try:
            return self.weight, torch.linalg.inv(weight_CC).to(self.weight.dtype)
        except torch.linalg.LinAlgError as error:
            raise self._ill_conditioned("is singular") from error

    @torch.no_grad()
    def fixed_matrices(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """(U, U⁻¹) for inference, the inverse taken in fp64 and rounded once; computed anew only when U has changed.

        Raises:
            UserError: U is singular, not finite or has a condition number above 10⁴.
        """
        key = (dtype, device, self.weight.data_ptr(), self.weight._version)
        if self._fixed is None or self._fixed[0] != key:
            if self.inverse == "orthogonal":
                basis_CC = _turned(self.start.double(), self.weight.double())
                decoder_CC = basis_CC.T
            else:
                basis_CC = self.weight.double()
                self.check_condition()
                decoder_CC = torch.linalg.inv(basis_CC)
            self._fixed = (key, basis_CC.to(device, dtype), decoder_CC.to(device, dtype))
        return self._fixed[1], self._fixed[2]

    @torch.no_grad()
    def check_condition(self) -> float:
        """The condition number of U. Raises :class:`UserError` naming the layer when it is not finite or above 10⁴."""
        if self.inverse == "orthogonal":
            return 1.0
        if not torch.isfinite(self.weight).all():
            raise self._ill_conditioned("holds NaN or infinite entries")
        condition = float(torch.linalg.cond(self.weight.double()))
        if not condition <= MAX_CONDITION:
            raise self._ill_conditioned(
                f"has condition number {condition:.3g} (at most {MAX_CONDITION:.0e} is allowed)"
            )
        return condition

    def _ill_conditioned(self, what: str) -> UserError:
        return UserError(
            f"the projection U of {self.name} {what}; go back to an earlier checkpoint and train with a smaller "
            f"learning rate for U, or with `compressor.inverse: orthogonal`"
        )


def _turned(start_CC: Tensor, weight_CC: Tensor) -> Tensor:
    """U₀ · exp(A − Aᵀ)."""
    return start_CC @ torch.linalg.matrix_exp(weight_CC - weight_CC.T)
