"""The loss-weighted basis of plans does not depend on how large a channel, or a part of a row, happens to be."""

import torch

from lowrank_kv.calibration.energy_weights import relative_weights
from lowrank_kv.calibration.spectrum import Spectrum

WIDTH = 12


def moment(seed: int) -> torch.Tensor:
    """A well-conditioned second moment."""
    rows_NC = torch.randn(80, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows_NC.T @ rows_NC / len(rows_NC)


def test_channels_of_other_units_are_coded_alike():
    """As outlier channels are: states so many times as large, gradients so many times smaller."""
    state_CC, gradient_CC = moment(0), moment(1)
    scale_C = torch.logspace(-1.5, 1.5, WIDTH, dtype=torch.float64)
    other = Spectrum.of_states(scale_C[:, None] * state_CC * scale_C, gradient_CC / scale_C[:, None] / scale_C)
    plain = Spectrum.of_states(state_CC, gradient_CC)
    torch.testing.assert_close(other.importance_C, plain.importance_C, rtol=1e-4, atol=0)
    # What is rebuilt of few coefficients is the same state, in other units.
    for kept in (1, 5, WIDTH):
        rebuilt, expected = (each.encoder_CC[:, :kept] @ each.decoder_CC[:kept] for each in (other, plain))
        torch.testing.assert_close(
            rebuilt.double() * scale_C[:, None] / scale_C, expected.double(), rtol=1e-3, atol=1e-4
        )


def test_by_energy_a_row_loses_as_little_of_its_parts_as_can_be():
    """The error over each part's energy, of the best basis there is: the principal components of parts of energy 1."""
    scale_C = torch.tensor([100.0] * 6 + [0.1] * 6, dtype=torch.float64)
    state_CC = scale_C[:, None] * moment(2) * scale_C
    weight_C = relative_weights(state_CC, 6).double()
    spectrum = Spectrum.of_states(state_CC, weight_C.diag())
    even_CC = weight_C.sqrt()[:, None] * state_CC * weight_C.sqrt()
    least_C = torch.linalg.eigvalsh(even_CC).flip(0)
    torch.testing.assert_close(spectrum.importance_C.double(), least_C, rtol=1e-5, atol=0)


def test_numbers_without_a_gradient_do_not_spoil_the_others():
    state_CC, gradient_CC = moment(3), moment(4)
    gradient_CC[-3:] = gradient_CC[:, -3:] = 0
    found = Spectrum.of_states(state_CC, gradient_CC)
    assert all(each.isfinite().all() for each in (found.encoder_CC, found.decoder_CC, found.importance_C))
    torch.testing.assert_close(found.encoder_CC @ found.decoder_CC, torch.eye(WIDTH), rtol=0, atol=1e-2)
    # Nothing is lost by dropping what matters to no one.
    lost_CC = torch.eye(WIDTH) - found.encoder_CC[:, :-3] @ found.decoder_CC[:-3]
    error_CC = lost_CC.T.double() @ state_CC @ lost_CC.double()
    assert (error_CC @ gradient_CC).trace() < 1e-3 * (state_CC @ gradient_CC).trace()
    none = Spectrum.of_states(state_CC, torch.zeros_like(state_CC))
    assert none.importance_C.eq(0).all()
    assert none.encoder_CC.isfinite().all()
