"""All coefficients of one layer's keys or values in the loss-weighted basis, in order of importance.

Shapes: C = G·D joint width.
"""

import dataclasses

from torch import Tensor

from lowrank_kv.bases.loss_weighted import weighted_basis

# The gradients' moment itself: near the uncompressed model the second-order estimate holds (docs/log/bit-plans.md).
_POWER = 1.0
# A tenth of each number's own mean square is added, as Marquardt's damping has it, so that a part of small gradients is not
# drowned by one of large ones, and no channel's unit matters. Numbers that have no gradient at all get next to nothing.
DAMPING, _UNSEEN = 0.1, 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spectrum:
    """A basis whose coefficients have mean square 1, and what they matter.

    Attributes:
        encoder_CC: coefficients are x · encoder, fp32.
        decoder_CC: its inverse.
        importance_C: w λ, what the loss asks of each coefficient: the mean square of its gradient. Falling, fp32.
    """

    encoder_CC: Tensor
    decoder_CC: Tensor
    importance_C: Tensor

    @classmethod
    def of_states(cls, state_CC: Tensor, gradient_CC: Tensor) -> "Spectrum":
        """The basis of states with these second moments, of the states and of the loss's gradients with regard to them."""
        gradient_CC = gradient_CC.double()
        damped_CC = gradient_CC + DAMPING * gradient_CC.diagonal().diag()
        basis = weighted_basis(state_CC, damped_CC, power=_POWER, damping=_UNSEEN)
        inverse_CC = basis.inverse_CC.double()
        importance_C = basis.energy_C * (inverse_CC @ gradient_CC * inverse_CC).sum(dim=1)
        order_C = importance_C.argsort(descending=True)
        size_C = basis.energy_C.clamp(min=float(basis.energy_C.max()) * 1e-9).clamp(min=1e-30).sqrt()
        encoder_CC, decoder_CC = basis.basis_CC / size_C, basis.inverse_CC * size_C[:, None]
        return cls(
            encoder_CC=encoder_CC[:, order_C],
            decoder_CC=decoder_CC[order_C],
            importance_C=importance_C[order_C].float(),
        )
