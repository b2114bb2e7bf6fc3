"""From what is read of a cache to its coder: loss-weighted bases, a width for each coefficient, codebooks.

One coder of which rank reduction (0 or 16 bits), integers of one width and everything between are special cases.

Shapes: N rows, C = G·D joint width, R coefficients that are kept.
"""

import dataclasses

import torch
from torch import Tensor

from lowrank_kv.bases.bit_allocation import allocate_bits
from lowrank_kv.bases.codebooks import distortion, lloyd_max
from lowrank_kv.bases.loss_weighted import weighted_basis
from lowrank_kv.calibration.activation_moments import KEY, VALUE
from lowrank_kv.calibration.calibration import Calibration, ReadStates
from lowrank_kv.stores.bit_plan import SCALE_BITS, UNCODED, WIDTHS, BitPlan

# The gradients' moment itself: near the uncompressed model the second-order estimate holds (docs/log/bit-plans.md).
_POWER = 1.0
# Allocation and codebooks depend on each other; after two rounds neither moves.
_ROUNDS = 2
# What Lloyd–Max quantizers of normal numbers leave (Max 1960), to begin with; of bf16, a uniform error of 2^-9.
_NORMAL = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499, 6: 0.00064, 8: 4.1e-5}
_BFLOAT16 = 2.0**-18 / 3
# Codebooks of so many bits also reach beyond what was sampled, up to what a row can hold at most. What no sample has is
# rare, but a coefficient that ends at the last level is then off by more than all others of its row together. So many
# numbers on either side stand for it.
_REACHING_BITS, _REACHING_NUMBERS = 5, 16
# Numbers that a codebook is fitted to at most.
_MOST_SAMPLES = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedBasis:
    """How one layer's keys before rotation, or its values, are coded.

    Attributes:
        encoder_CC: all coefficients are x · encoder, about equally large, and in order of importance; fp32.
        decoder_CC: its inverse, which gives states from coefficients; fp32.
        plan: how the first coefficients are packed; the others are not kept.
    """

    encoder_CC: Tensor
    decoder_CC: Tensor
    plan: BitPlan


def coded_bases(calibration: Calibration, rate: float, *, itemsize: int = 2) -> dict[int, dict[str, CodedBasis]]:
    """Layer index → ``key``, ``value`` → its coder, the budget spread over all of them by what the loss asks.

    Args:
        calibration: with what is read of a cache (:meth:`Calibration.read_states`).
        rate: bytes of a compressed token over those of an uncompressed one, in (0, 1].
        itemsize: bytes of an uncompressed number.

    Raises:
        UserError: the calibration does not say what is read, or the rate leaves no bit for every layer.
    """
    read = calibration.read_states()
    sides = [(index, side) for index in calibration.geometry.layers for side in (KEY, VALUE)]
    spectra = [_Spectrum.of(read[index][side]) for index, side in sides]
    importances = [spectrum.importance_C for spectrum in spectra]
    budget = int(rate * itemsize * sum(len(importance_C) for importance_C in importances))
    levels, distortions = {}, _NORMAL
    for _ in range(_ROUNDS):
        widths = allocate_bits(importances, {**distortions, UNCODED: _BFLOAT16}, budget, overhead=SCALE_BITS)
        levels, distortions = _fitted(spectra, widths)
    widths = allocate_bits(importances, {**distortions, UNCODED: _BFLOAT16}, budget, overhead=SCALE_BITS)
    found: dict[int, dict[str, CodedBasis]] = {index: {} for index in calibration.geometry.layers}
    for (index, side), spectrum, row in zip(sides, spectra, widths, strict=True):
        plan = BitPlan([bits for bits in row if bits], levels)
        found[index][side] = CodedBasis(encoder_CC=spectrum.encoder_CC, decoder_CC=spectrum.decoder_CC, plan=plan)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Spectrum:
    """All coefficients of one layer's keys or values, in order of importance.

    Attributes:
        unit_NC: those of sampled rows, divided by their root mean squares.
        importance_C: what the loss asks of them, w λ.
    """

    encoder_CC: Tensor
    decoder_CC: Tensor
    unit_NC: Tensor
    importance_C: Tensor

    @classmethod
    def of(cls, read: ReadStates) -> "_Spectrum":
        basis = weighted_basis(read.state_CC, read.gradient_CC, power=_POWER)
        inverse_CC, gradient_CC = basis.inverse_CC.double(), read.gradient_CC.double()
        importance_C = basis.energy_C * (inverse_CC @ gradient_CC * inverse_CC).sum(dim=1)
        order_C = importance_C.argsort(descending=True)
        size_C = basis.energy_C.clamp(min=float(basis.energy_C.max()) * 1e-9).clamp(min=1e-30).sqrt()
        encoder_CC, decoder_CC = basis.basis_CC / size_C, basis.inverse_CC * size_C[:, None]
        return cls(
            encoder_CC=encoder_CC[:, order_C],
            decoder_CC=decoder_CC[order_C],
            unit_NC=read.sample_NC.float() @ encoder_CC[:, order_C],
            importance_C=importance_C[order_C],
        )


def _fitted(spectra: list[_Spectrum], widths: list[list[int]]) -> tuple[dict[int, Tensor], dict[int, float]]:
    """(levels, distortions) of each width, fitted to the coefficients that have it, of rows divided by their scales. A width
    that too few have is fitted to all."""
    samples: dict[int, list[Tensor]] = {bits: [] for bits in WIDTHS if bits != UNCODED}
    for spectrum, row in zip(spectra, widths, strict=True):
        width_C = torch.tensor(row)
        kept_NR = spectrum.unit_NC[:, width_C > 0]
        scaled_NR = kept_NR / kept_NR.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-12)
        for bits, found in samples.items():
            found.append(scaled_NR[:, width_C[width_C > 0] == bits].flatten())
    widest = max(map(len, widths))
    together = {bits: _thinned(torch.cat(found)) for bits, found in samples.items()}
    everything = _thinned(torch.cat(list(together.values())))
    levels, distortions = {}, {}
    for bits, sample_N in together.items():
        sample_N = sample_N if len(sample_N) >= 64 * 2**bits else everything
        levels[bits] = lloyd_max(_reaching(sample_N, widest) if bits >= _REACHING_BITS else sample_N, bits)
        distortions[bits] = distortion(sample_N, levels[bits])
    return levels, distortions


def _reaching(sample_N: Tensor, width: int) -> Tensor:
    """The same and a few numbers from the largest up to √C, the most that a row of C of mean square 1 holds."""
    bounds = sample_N.abs().max().clamp(1e-3, width**0.5).log(), torch.tensor(float(width)).sqrt().log()
    beyond_N = torch.linspace(*map(float, bounds), _REACHING_NUMBERS).exp()
    return torch.cat([sample_N, beyond_N, -beyond_N])


def _thinned(sample_N: Tensor) -> Tensor:
    return sample_N[:: max(1, len(sample_N) // _MOST_SAMPLES)]
