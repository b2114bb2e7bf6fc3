"""The learned projection into spectral space and its way back (DynaKV, section 3.1).

Shapes: C joint width.
"""

import itertools
import math

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from dynakv.inversion import inverse_near
from lowrank_kv.hf.geometry import check_not_offloaded
from lowrank_kv.utils.errors import UserError

# A kind of decoder that no configuration names: `rank_policy: plan` learns so.
RELATIVE = "relative"
# Past this condition number, rounding U⁻¹ to bf16 costs more than the truncation saves.
MAX_CONDITION = 1e4


class Projection(nn.Module):
    """U of equation 1, started from a PCA basis and trained, and V, which stands for U⁻¹ of equation 3.

    ``exact`` learns U itself and inverts it. ``orthogonal`` learns U = U₀ · exp(A − Aᵀ), which stays orthogonal, so that
    the inverse is the transpose. ``decoupled`` learns U and V apart, V started from the inverse: nothing is ever
    inverted, and V may make up for what truncation takes. ``relative`` is ``exact`` with U = U₀ (I + A), V = (I + A)⁻¹ V₀,
    and learns A: where coefficients are about equally large, so are the steps that they ask for.
    """

    def __init__(self, width: int, *, decoder: str, name: str):
        super().__init__()
        self.name, self.decoder_kind = name, decoder
        starts_at_zero = decoder in ("orthogonal", RELATIVE)
        self.weight = nn.Parameter(torch.zeros(width, width) if starts_at_zero else torch.eye(width))
        if decoder == "orthogonal":
            self.register_buffer("start", torch.eye(width))
        elif decoder == "decoupled":
            self.decoder = nn.Parameter(torch.eye(width))
        elif decoder == RELATIVE:
            self.register_buffer("start", torch.eye(width))
            self.register_buffer("start_inverse", torch.eye(width))
        self._inverted: tuple[Tensor, Tensor] | None = None  # the latest U that was inverted, and its inverse
        # (dtype, device) → versions of the tensors, U, V, digests of the parameters
        self._fixed: dict[tuple, tuple] = {}

    @torch.no_grad()
    def initialize(self, basis_CC: Tensor, inverse_CC: Tensor) -> None:
        """Start from a basis and its inverse; ``orthogonal`` from an orthonormal one."""
        if self.decoder_kind in ("orthogonal", RELATIVE):
            self.weight.zero_()
            self.start.copy_(basis_CC)
            if self.decoder_kind == RELATIVE:
                self.start_inverse.copy_(inverse_CC)
            return
        self.weight.copy_(basis_CC)
        if self.decoder_kind == "decoupled":
            self.decoder.copy_(inverse_CC)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """(U, V), differentiable, in the parameters' dtype even under autocast. Raises :class:`UserError` for a singular U.

        Passes of one optimizer step, and the recomputed one of gradient checkpointing, share one inversion.
        """
        with torch.autocast(self.weight.device.type, enabled=False):
            return self._matrices()

    def _matrices(self) -> tuple[Tensor, Tensor]:
        if self.decoder_kind == "orthogonal":
            basis_CC = _orthogonal_basis(self.start, self.weight)
            return basis_CC, basis_CC.T
        if self.decoder_kind == "decoupled":
            return self.weight, self.decoder
        inverted_CC = self._inverted_matrix(self.weight)
        inverse_CC = _Inverse.apply(inverted_CC, self._latest_inverse(inverted_CC))
        if self.decoder_kind == RELATIVE:
            return self.start @ inverted_CC, inverse_CC @ self.start_inverse
        return inverted_CC, inverse_CC

    def _inverted_matrix(self, weight_CC: Tensor) -> Tensor:
        """What is inverted, of the weight in any dtype: U itself, or the I + A that takes its start to U."""
        if self.decoder_kind == RELATIVE:
            return torch.eye(len(weight_CC), dtype=weight_CC.dtype, device=weight_CC.device) + weight_CC
        return weight_CC

    @torch.inference_mode(False)  # what is kept may next be asked for by a pass with gradients
    @torch.no_grad()
    def _latest_inverse(self, matrix_CC: Tensor) -> Tensor:
        # Compared by content: sharded training puts other numbers into the same storage without a trace. Reading C² numbers
        # is nothing beside inverting them.
        if self._inverted is None or not torch.equal(self._inverted[0], matrix_CC):
            self._inverted = matrix_CC.detach().clone(), self._inverse_of(matrix_CC)
        return self._inverted[1]

    def _inverse_of(self, matrix_CC: Tensor) -> Tensor:
        wide_CC = matrix_CC.float()
        # A processor factorizes faster than it multiplies five times, a GPU many times slower.
        if wide_CC.is_cuda and self._inverted is not None and self._inverted[1].device == wide_CC.device:
            near_CC = inverse_near(wide_CC, self._inverted[1].float())
            if near_CC is not None:
                return near_CC.to(matrix_CC.dtype)
        try:
            return torch.linalg.inv(wide_CC).to(matrix_CC.dtype)
        except torch.linalg.LinAlgError as error:
            raise self._ill_conditioned("is singular") from error

    def fixed_matrices(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """(U, V) for inference, an inverse taken in fp64 and rounded once; computed anew only when a tensor has changed.

        A write through a parameter's `.data` leaves no trace that each call could see; :meth:`forget_if_changed` does.

        Raises:
            UserError: U is offloaded or not finite, or must be inverted and is singular or has a condition number above 10⁴.
        """
        made_of = itertools.chain(self._parameters.values(), self._buffers.values())
        versions = [(each.data_ptr(), each._version) for each in made_of]
        found = self._fixed.get((dtype, device))
        if found is None or found[0] != versions:
            self.check_condition()
            # Only here: entering them takes longer than all else where nothing has changed. Not in inference mode: what is
            # kept may next be asked for by a pass with gradients.
            with torch.inference_mode(False), torch.no_grad():
                matrices = [matrix.to(device, dtype).contiguous() for matrix in self._in_fp64()]
            found = self._fixed[dtype, device] = versions, *matrices, self._digests()
        return found[1], found[2]

    def forget_if_changed(self) -> None:
        """Forget :meth:`fixed_matrices` of parameters that hold other numbers by now, however they came there. Reads all
        parameters: to be called when a cache is made."""
        if self._fixed:
            sums = self._digests()
            self._fixed = {key: found for key, found in self._fixed.items() if found[-1] == sums}

    def _digests(self) -> tuple[tuple[int, float], ...]:
        return tuple(_digest(each.detach()) for each in self._parameters.values() if not each.is_meta)

    @torch.no_grad()
    def check_condition(self) -> None:
        """Raise :class:`UserError` naming the layer when a parameter is offloaded or not finite, or U must be inverted and
        its condition number is above 10⁴."""
        for parameter in self.parameters():
            check_not_offloaded(parameter.device, f"the projection U of {self.name}")
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self.parameters()):
            raise self._ill_conditioned("holds NaN or infinite entries")
        if self.decoder_kind in ("exact", RELATIVE) and (condition := self.condition()) > MAX_CONDITION:
            raise self._ill_conditioned(
                f"has condition number {condition:.3g} (at most {MAX_CONDITION:.0e} is allowed)"
            )

    @torch.no_grad()
    def condition(self) -> float:
        """σ₁ / σ_C of U, or of the I + A that takes its start to it; 1 where U is orthogonal, infinite where it is singular
        to fp64."""
        if self.decoder_kind == "orthogonal":
            return 1.0
        # Of UᵀU, whose eigenvalues come several times faster than singular values; exact to 1e-8 at the bound.
        inverted_CC = self._inverted_matrix(self.weight.double())
        energy_C = torch.linalg.eigvalsh(inverted_CC.T @ inverted_CC)
        return math.sqrt(energy_C[-1] / energy_C[0]) if energy_C[0] > 0 else math.inf

    @torch.no_grad()
    def inversion_error(self) -> float:
        """‖U V − I‖ / ‖I‖ (Frobenius) as training computes it: how far all coefficients are from rebuilding a token."""
        basis_CC, decoder_CC = self.matrices()
        with torch.autocast(basis_CC.device.type, enabled=False):
            product_CC = basis_CC @ decoder_CC
        return float((product_CC - torch.eye(len(product_CC)).to(product_CC)).norm() / len(product_CC) ** 0.5)

    def _in_fp64(self) -> tuple[Tensor, Tensor]:
        if self.decoder_kind == "orthogonal":
            basis_CC = _orthogonal_basis(self.start.double(), self.weight.double())
            return basis_CC, basis_CC.T
        if self.decoder_kind == "decoupled":
            return self.weight.double(), self.decoder.double()
        inverted_CC = self._inverted_matrix(self.weight.double())
        inverse_CC = torch.linalg.inv(inverted_CC)
        if self.decoder_kind == RELATIVE:
            return self.start.double() @ inverted_CC, inverse_CC @ self.start_inverse.double()
        return inverted_CC, inverse_CC

    def _ill_conditioned(self, what: str) -> UserError:
        # A plan of bits has a decoder of its own kind.
        other = "" if self.decoder_kind == RELATIVE else ", or with `compressor.decoder: orthogonal`"
        return UserError(
            f"the projection U of {self.name} {what}; go back to an earlier checkpoint and train with a smaller "
            f"learning rate for U{other}"
        )


class _Inverse(torch.autograd.Function):
    """U⁻¹, known already, as a function of U: dU = −U⁻ᵀ dV U⁻ᵀ."""

    @staticmethod
    def forward(ctx: FunctionCtx, weight_CC: Tensor, inverse_CC: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_CC)
        return inverse_CC.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_CC: Tensor) -> tuple[Tensor, None]:
        [inverse_CC] = ctx.saved_tensors
        return -(inverse_CC.T @ grad_CC @ inverse_CC.T), None


def _digest(matrix_CC: Tensor) -> tuple[int, float]:
    """What tells a matrix from another: the sum of its bits, which any other number changes, and one that another order of
    the numbers changes. A hash would take many times as long as making a cache."""
    ramp_C = torch.linspace(0.5, 1.5, len(matrix_CC), dtype=matrix_CC.dtype, device=matrix_CC.device)
    return int(matrix_CC.view(torch.int32).sum()), float(ramp_C @ matrix_CC @ ramp_C.square())


def _orthogonal_basis(start_CC: Tensor, weight_CC: Tensor) -> Tensor:
    """U₀ · exp(A − Aᵀ)."""
    return start_CC @ torch.linalg.matrix_exp(weight_CC - weight_CC.T)
