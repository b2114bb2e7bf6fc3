"""Where a compressor's training starts: from the states alone, as in the paper, or from what the loss answers to as well."""

import math

import torch
from transformers import PreTrainedModel

from dynakv.compressor import TokenCompressor
from dynakv.config import PLAN
from dynakv.mask import cumulative
from dynakv.model_compressors import compressors, settings_of
from dynakv.ranked_compressor import RankedCompressor
from lowrank_kv.bases.loss_weighted import weighted_basis
from lowrank_kv.bases.moments import SecondMoment
from lowrank_kv.bases.pca import pca_basis
from lowrank_kv.bases.rank_allocation import waterfill_ranks
from lowrank_kv.calibration.bit_plans import CodedBasis
from lowrank_kv.utils.config import require

Moments = dict[int, dict[str, SecondMoment]]
Coders = dict[int, dict[str, CodedBasis]]


def initialize_from_moments(model: PreTrainedModel, moments: Moments) -> None:
    """Start every layer from the PCA of its calibration moments (section 3.1), gates nearly open.

    Args:
        moments: layer index → {"key": of unrotated joint keys, "value": of joint values}.

    Raises:
        UserError: a plan of bits, which starts from coders.
    """
    for (index, side), compressor in _ranked_sides(model).items():
        compressor.initialize(pca_basis(moments[index][side].mean()[None]))


def initialize_from_gradients(
    model: PreTrainedModel,
    moments: Moments,
    gradients: Moments,
    rate: float,
    *,
    key_cost: float = 1.0,
    floor: float = 0.0,
) -> float:
    """Start every layer from the PCA of its moments weighted by the loss's gradients, and every gate at a rank of its own.

    Beyond the paper, which says how projections start and not how gates do: here the ranks are spread over layers, keys and
    values by water-filling on the estimated loss (:func:`lowrank_kv.bases.loss_weighted.weighted_basis`), so
    that the mean is about `rate` (ranks are rounded to `granularity`) from the first step on, and training sets out
    from what a good allocation without it would be.

    Args:
        moments, gradients: layer index → {"key", "value"}: of unrotated joint keys and joint values, and of the loss's
            gradients with regard to them (:func:`lowrank_kv.calibration.gradient_moments.gradient_moments`).
        rate: hard retain rate to start at.
        key_cost: how much more loss a coefficient of keys must save than one of values to be kept, as in
            :func:`dynakv.objective.objective`.
        floor: share of every layer's keys and of its values that is kept whatever the estimate says, below `rate`.

    Returns:
        the price α at which the objective would neither open these gates nor close them, were the estimate right: one more
        coefficient would add as much to α R² as it took from the loss.

    Raises:
        UserError: orthogonal projections, or one rank for all tokens, which can start only from a PCA, or a plan of bits,
            which starts from coders.
    """
    sides = _ranked_sides(model)
    next(iter(sides.values())).config.check_gradient_start()
    bases = [weighted_basis(moments[index][side].mean(), gradients[index][side].mean()) for index, side in sides]
    costs = [key_cost if side == "key" else 1.0 for _, side in sides]
    losses_C = [basis.loss_C.double() / cost for basis, cost in zip(bases, costs, strict=True)]
    for loss_C in losses_C:
        loss_C[: math.ceil(floor * len(loss_C))] = torch.inf
    soft = 0.0
    for compressor, basis, rank, cost in zip(
        sides.values(), bases, waterfill_ranks(losses_C, rate), costs, strict=True
    ):
        compressor.initialize_at(basis, rank)
        soft += cost * float(cumulative(compressor.gate.bias.detach()).sum())
    falling = torch.cat(losses_C).sort(descending=True).values
    kept = max(round(rate * len(falling)), int(falling.isinf().sum()))
    level = float(falling[min(kept, len(falling) - 1)])
    # R = Σ cost · (soft rank) / Σ cost · C: one coefficient more adds 2 α R · cost / Σ cost · C, and saves cost · level.
    return level * sum(cost * len(loss_C) for cost, loss_C in zip(costs, losses_C, strict=True)) ** 2 / (2 * soft)


def initialize_from_coders(model: PreTrainedModel, coders: Coders) -> None:
    """Start every layer from the coder that needs no training (:func:`lowrank_kv.calibration.bit_plans.coded_bases`).

    Args:
        coders: layer index → {"key": of unrotated joint keys, "value": of joint values}, or the last of layers that are
            coded together → {"key_value": of both}.

    Raises:
        UserError: there is no plan of bits.
    """
    policy = settings_of(model).rank_policy
    require(policy == PLAN, "rank_policy", policy, f"{PLAN} to start from coders of bits")
    for (index, side), compressor in _sides(model).items():
        compressor.initialize_coded(coders[index][side])


def _ranked_sides(model: PreTrainedModel) -> dict[tuple[int, str], RankedCompressor]:
    policy = settings_of(model).rank_policy
    require(policy != PLAN, "rank_policy", policy, "one that keeps ranks; a plan starts from coders of bits")
    return _sides(model)


def _sides(model: PreTrainedModel) -> dict[tuple[int, str], TokenCompressor]:
    """(layer index, "key" or "value") → its compressor; or of layers that are coded together (last index, "key_value")."""
    return {
        (index, side): compressor
        for index, layer in compressors(model).items()
        for side, compressor in layer.sides.items()
    }
