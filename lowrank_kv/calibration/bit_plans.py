"""From what is read of a cache to its coder: bases weighted by the loss, or by energy, widths of coefficients, codebooks.

One coder of which rank reduction (0 or 16 bits), integers of one width and everything between are special cases.

Shapes: N rows, C width: the joint width G·D of keys, and of values, the sum of those that are coded
together; R coefficients that are kept.
"""

import dataclasses
import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from lowrank_kv.bases.bit_allocation import BudgetTooSmallError, allocate_bits, next_saving
from lowrank_kv.bases.codebooks import distortion, lloyd_max
from lowrank_kv.calibration.activation_moments import KEY, KEY_VALUE, VALUE
from lowrank_kv.calibration.calibration import Calibration, ReadStates
from lowrank_kv.calibration.spectrum import Spectrum
from lowrank_kv.stores.bit_plan import SCALE_BITS, UNCODED, WIDTHS, BitPlan
from lowrank_kv.stores.importance_gate import ImportanceGate
from lowrank_kv.stores.token_plans import PLACE_BYTES, TokenPlans
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.torch_defaults import fp32_on_cpu

# Allocation and codebooks depend on each other; after two rounds neither moves.
_ROUNDS = 2
# What Lloyd–Max quantizers of normal numbers leave (Max 1960), to begin with; of bf16, a uniform error of 2^-9.
_NORMAL = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499, 6: 0.00064, 8: 4.1e-5}
_BFLOAT16 = 2.0**-18 / 3
# Codebooks of so many bits also reach beyond what was sampled, up to what a row can hold at most. What no sample has is
# rare, but a coefficient that ends at the last level is then off by more than all others of its row together. So many
# numbers on either side stand for it.
_REACHING_BITS, _REACHING_NUMBERS = 5, 16
# About how many numbers a codebook is fitted to at most.
_MOST_SAMPLES = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedBasis:
    """How one layer's keys before rotation, its values, or both in one layer or several together, are coded.

    Attributes:
        encoder_CC: all coefficients are x · encoder, about equally large, and in order of importance; fp32.
        decoder_CC: its inverse, which gives states from coefficients; fp32.
        plan: how the first coefficients are packed, of all tokens or by their class; the others are not kept.
        importance_C: what the loss asks of each coefficient; falling, fp32.
    """

    encoder_CC: Tensor
    decoder_CC: Tensor
    plan: BitPlan | TokenPlans
    importance_C: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedModel:
    """How all keys and values of a model are coded.

    Attributes:
        layers: layer index → ``key``, ``value`` → its coder; or the last of layers that are coded together → ``key_value``.
        loss_per_rate: by how much a mean token's loss, in nats, would fall for one more unit of the rate, were the estimate
            right: half of what coefficients are asked (a second-order loss with the Fisher information as curvature). None
            where energy stands for the gradients.
    """

    layers: dict[int, dict[str, CodedBasis]]
    loss_per_rate: float | None


def coded_bases(
    calibration: Calibration,
    rate: float,
    *,
    token_classes: int = 1,
    rebuild_cost: float = 0.0,
    joint_layers: int = 0,
) -> dict[int, dict[str, CodedBasis]]:
    """The coders of :func:`coded_model`, which takes the same arguments."""
    settings = {"token_classes": token_classes, "rebuild_cost": rebuild_cost, "joint_layers": joint_layers}
    return coded_model(calibration, rate, **settings).layers


@fp32_on_cpu()
def coded_model(
    calibration: Calibration,
    rate: float,
    *,
    token_classes: int = 1,
    rebuild_cost: float = 0.0,
    joint_layers: int = 0,
) -> CodedModel:
    """Coders of all layers' keys and values, the budget spread over all of them by what the loss asks.

    Args:
        calibration: with what is read of a cache (:meth:`Calibration.read_states`).
        rate: bytes of a compressed token over those of one in 16 bits, in (0, 1]; their mean over the calibration's tokens
            where there are classes of them.
        token_classes: K, how many plans each layer's keys, and its values, have; 1 codes all tokens alike.
        rebuild_cost: bits that keeping a coefficient of keys counts for beyond those it takes.
        joint_layers: of how many consecutive layers keys and values are coded together, as rows [key, value, key, value, …];
            0 codes each layer's keys, and its values, by themselves.

    Warns where the calibration is of fewer tokens than twice the numbers of a row.

    Raises:
        UserError: the calibration does not say what is read, or the rate leaves no bit for every layer.
    """
    if joint_layers:
        joint = calibration.joint_read_states(joint_layers)
        read = {group[-1]: {KEY_VALUE: states} for group, states in joint.items()}
    else:
        read = {
            index: {side: sides[side] for side in (KEY, VALUE)} for index, sides in calibration.read_states().items()
        }
    _warn_of_few_tokens(
        calibration, joint_layers, max(len(each.state_CC) for side in read.values() for each in side.values())
    )
    names = [(index, side) for index, sides in read.items() for side in sides]
    sides = [_Side.of(read[index][side], token_classes) for index, side in names]
    importances = [side.spectrum.importance_C * weight for side in sides for weight in side.weights]
    shares = [share for side in sides for share in side.shares]
    rebuild_costs = [
        0.0 if name == VALUE else rebuild_cost
        for (_, name), side in zip(names, sides, strict=True)
        for _ in side.shares
    ]
    units = [unit_NC for side in sides for unit_NC in side.units]
    uncompressed = 2 * sum(len(side.spectrum.importance_C) for side in sides)
    places = PLACE_BYTES * len(sides) if token_classes > 1 else 0

    def allocated(distortions: Mapping[int, float]) -> list[list[int]]:
        budget = rate * uncompressed - places
        try:
            return allocate_bits(
                importances,
                {**distortions, UNCODED: _BFLOAT16},
                budget,
                overhead=SCALE_BITS,
                shares=shares,
                rebuild_costs=rebuild_costs,
            )
        except BudgetTooSmallError as error:
            least = (error.needed + places) / uncompressed
            raise UserError(
                f"the rate {rate} leaves no bit for the keys and values of every layer; give at least "
                f"{math.ceil(1e4 * least) / 1e4}"
            ) from error

    widths = allocated(_NORMAL)
    for _ in range(_ROUNDS):
        levels, distortions = _fitted(units, widths)
        widths = allocated(distortions)
    plans = iter([BitPlan([bits for bits in row if bits], levels) for row in widths])
    found: dict[int, dict[str, CodedBasis]] = {index: {} for index in read}
    for (index, name), side in zip(names, sides, strict=True):
        found[index][name] = side.coded([next(plans) for _ in side.shares])
    if calibration.by_energy:
        return CodedModel(layers=found, loss_per_rate=None)
    saved_by_a_bit = next_saving(importances, {**distortions, UNCODED: _BFLOAT16}, widths)
    return CodedModel(layers=found, loss_per_rate=saved_by_a_bit / 2 * 8 * uncompressed)


def _warn_of_few_tokens(calibration: Calibration, joint_layers: int, width: int) -> None:
    """Warn where a calibration has too few rows for their width: the gate that tells classes of tokens apart then fits these
    rows alone, and puts all tokens of another text into one class (docs/log/bit-plans.md)."""
    if (calibration.tokens or math.inf) < 2 * width:
        narrower = ", or code layers by themselves, as `adaptive-mixed` does" if joint_layers else ""
        together = f" (`joint_layers: {joint_layers}`)" if joint_layers else ""
        warnings.warn(
            f"{calibration.origin} is of {calibration.tokens:,} tokens, too few for rows of {width:,} numbers{together}: "
            f"calibrate on at least {2 * width:,}, or better on {10 * width:,}{narrower}",
            stacklevel=4,  # whoever calls `coded_model`, which is wrapped
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Side:
    """One layer's keys, its values, or both together, whose tokens are in classes.

    Attributes:
        units: sampled rows of each class as coefficients, (N, C) each.
        shares, weights: see :class:`lowrank_kv.calibration.token_gates.TokenClasses`.
        gate, bounds_K: tell a token's class; None where there is one for all.
    """

    spectrum: Spectrum
    units: list[Tensor]
    shares: list[float]
    weights: list[float]
    gate: ImportanceGate | None = None
    bounds_K: Tensor | None = None

    @classmethod
    def of(cls, read: ReadStates, token_classes: int) -> "_Side":
        spectrum = read.spectrum
        unit_NC = read.sample_NC.float() @ spectrum.encoder_CC
        if token_classes == 1:
            return cls(spectrum=spectrum, units=[unit_NC], shares=[1.0], weights=[1.0])
        classes = read.fit.classes(token_classes)
        class_N = torch.bucketize(read.fit.gate.scores(unit_NC), classes.bounds_K)
        return cls(
            spectrum=spectrum,
            units=[unit_NC[class_N == k] for k in range(token_classes)],
            shares=classes.shares,
            weights=classes.weights,
            gate=read.fit.gate,
            bounds_K=classes.bounds_K,
        )

    def coded(self, plans: list[BitPlan]) -> CodedBasis:
        plan = plans[0]
        if self.gate is not None:
            plan = TokenPlans(gate=self.gate, bounds_K=self.bounds_K, plans=tuple(plans), shares=tuple(self.shares))
        return CodedBasis(
            encoder_CC=self.spectrum.encoder_CC,
            decoder_CC=self.spectrum.decoder_CC,
            plan=plan,
            importance_C=self.spectrum.importance_C,
        )


def _fitted(units: list[Tensor], widths: list[list[int]]) -> tuple[dict[int, Tensor], dict[int, float]]:
    """(levels, distortions) of each width, fitted to the coefficients that have it, of rows divided by their scales. A width
    that too few have is fitted to all that are coded, or, where all are held in 16 bits, to those.

    Args:
        units: sampled coefficients of each kind of rows, (N, C), whose widths are `widths`.
    """
    samples: dict[int, list[Tensor]] = {bits: [] for bits in WIDTHS}
    for unit_NC, row in zip(units, widths, strict=True):
        width_C = torch.tensor(row)
        kept_NR = unit_NC[:, width_C > 0]
        scaled_NR = kept_NR / kept_NR.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-12)
        for bits, found in samples.items():
            found.append(scaled_NR[:, width_C[width_C > 0] == bits].flatten())
    widest = max(map(len, widths))
    together = {bits: _thinned(torch.cat(found)) for bits, found in samples.items()}
    uncoded_N = together.pop(UNCODED)
    everything = _thinned(torch.cat(list(together.values())))
    everything = everything if len(everything) else uncoded_N
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
