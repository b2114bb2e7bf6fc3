"""When soft thresholds are learned, and when the ranks that they left are fixed (STAR-KV)."""

import math
import warnings

import torch
from transformers import PreTrainedModel

import dynakv
from lowrank_kv.bases.rank_allocation import waterfill_ranks

from .engine import Engine


def learns_at(step: int, steps: int, fix_ranks_from: float) -> bool:
    """Whether thresholds say the ranks in a step, counted from 0, of `steps`; they are fixed after `rate.fix_ranks_from`."""
    return step < fix_ranks_from * steps


def has_fixed_ranks(model: PreTrainedModel) -> bool:
    """Whether the ranks of a model with ``rank_policy: soft_threshold`` are fixed."""
    return all(side.gate.is_fixed for side in dynakv.token_compressors(model))


def learn_again(model: PreTrainedModel) -> None:
    """Have the thresholds of a model with ``rank_policy: soft_threshold`` say the ranks, as a checkpoint has them fixed."""
    for side in dynakv.token_compressors(model):
        side.gate.learn()


def warn_of_fixed_ranks(engine: Engine, step: int, steps_before: int) -> None:
    """Warn where ranks of a resumed run are fixed that its steps would still have thresholds learn.

    Args:
        engine: with a model of ``rank_policy: soft_threshold``, as the state has it.
        step: the next one, counted from 0.
        steps_before: `optimizer.steps` of the state.
    """
    steps, share = engine.config.optimizer.steps, engine.config.rate.fix_ranks_from
    if learns_at(step, steps, share) and has_fixed_ranks(engine.model):
        warnings.warn(
            f"`optimizer.steps` was {steps_before} and is {steps}: the run has fixed its ranks already, which stay as they "
            f"are, and only the bases learn; for thresholds that learn again, start another run from this one's checkpoint "
            f"(`initial_checkpoint`, and another `output`)",
            stacklevel=2,
        )


def fix_ranks_if_due(engine: Engine, step: int) -> None:
    """Fix the ranks that the thresholds have learned, once the first `rate.fix_ranks_from` of a run is over. Ranks that are
    fixed stay so, though a run that resumes with more steps would not have fixed them yet.

    Args:
        engine: with a model of ``rank_policy: soft_threshold``.
        step: the next one, counted from 0.
    """
    rate, steps = engine.config.rate, engine.config.optimizer.steps
    if not learns_at(step, steps, rate.fix_ranks_from) and not has_fixed_ranks(engine.model):
        with engine.gather_full(engine.compressor_parameters()):
            fix_ranks(engine.model, rate.target_retain_rate, floor=rate.layer_floor)


@torch.no_grad()
def fix_ranks(model: PreTrainedModel, rate: float, *, floor: float = 0.0) -> float:
    """Fix the ranks of a model at what its thresholds keep, all of them times the one factor that meets a rate.

    The price holds the rate to within a point or two; the factor closes the rest, and leaves the thresholds' proportions, as
    the calibration of τ does for gates. Ranks are multiples of the granularity.

    Args:
        model: attached, with ``rank_policy: soft_threshold``.
        rate: share of all coefficients to keep, in (0, 1].
        floor: share of every layer's keys and of its values that is kept whatever the thresholds say, below `rate`.

    Returns:
        the rate that is met.
    """
    sides = dynakv.token_compressors(model)
    energies = [side.gate.relative_energies().cpu() for side in sides]
    for energy_C in energies:
        energy_C[: math.ceil(floor * len(energy_C))] = torch.inf
    for side, rank in zip(sides, waterfill_ranks(energies, rate, sides[0].config.granularity), strict=True):
        side.gate.fix(rank)
    return sum(side.gate.rate for side in sides) / len(sides)
