"""The inverse of a matrix from that of one near to it. `make test-gpu` runs these on a GPU, too."""

import pytest
import torch

from dynakv.inversion import inverse_near
from dynakv.projection import Projection

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def orthogonal(width, *, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(width, width, generator=generator))[0].to(device)


def moved(matrix, step):
    """As a step of an optimizer moves it: every number by about as much."""
    generator = torch.Generator().manual_seed(1)
    return matrix + step * torch.randn(matrix.shape, generator=generator).sign().to(matrix.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("width", "step"), [(64, 1e-3), (192, 1e-2), (512, 3e-4), (512, 0.0)])
@pytest.mark.parametrize("condition", [1, 1000])
def test_it_is_the_inverse(device, width, step, condition):
    scale = torch.logspace(0, -torch.log10(torch.tensor(float(condition))), width, device=device)
    start = orthogonal(width, device=device) * scale
    matrix = moved(start, step / condition)
    found = inverse_near(matrix, torch.linalg.inv(start))
    expected = torch.linalg.inv(matrix.double())
    assert found.dtype == torch.float32
    assert (found - expected).norm() / expected.norm() < 2e-6


@pytest.mark.parametrize("what", ["far", "singular", "nan"])
def test_nothing_is_given_that_does_not_converge(what):
    start = orthogonal(64)
    matrix = {"far": moved(start, 1.0), "singular": torch.zeros(64, 64), "nan": torch.full((64, 64), torch.nan)}[what]
    assert inverse_near(matrix, start.T) is None


def test_a_known_inverse_stays_as_it_is():
    start = orthogonal(64)
    known = inverse_near(start, torch.linalg.inv(start))  # as exact as fp32 allows
    assert inverse_near(start, known) is known


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decoder", ["exact", "relative"])
def test_a_training_projection_inverts_what_it_has_become(device, decoder):
    projection = Projection(64, decoder=decoder, name="layer 0's keys").to(device)
    basis = orthogonal(64, device=device)
    projection.initialize(basis, basis.T.contiguous())
    for step in range(5):
        basis_CC, decoder_CC = projection.matrices()
        torch.testing.assert_close(basis_CC @ decoder_CC, torch.eye(64, device=device), atol=1e-5, rtol=0)
        with torch.no_grad():
            projection.weight.copy_(moved(projection.weight, 1e-3 * (step + 1)))
