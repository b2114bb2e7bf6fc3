"""When soft thresholds are learned, and when the ranks that they left are fixed (STAR-KV)."""

import math

import torch
from transformers import PreTrainedModel

import dynakv
from lowrank_kv.bases.rank_allocation import waterfill_ranks

from .engine import Engine


def learns_at(step: int, steps: int, fix_ranks_from: float) -> bool:
    """Whether thresholds say the ranks in a step, counted from 0, of `steps`; they are fixed after `rate.fix_ranks_from`."""
    return step < fix_ranks_from * steps


def learn_or_fix(engine: Engine, step: int) -> None:
    """Have the thresholds say the ranks in the first `rate.fix_ranks_from` of a run; fix these when that is over.

    Args:
        engine: with a model of ``rank_policy: soft_threshold``.
        step: the next one, counted from 0.
    """
    rate, steps = engine.config.rate, engine.config.optimizer.steps
    gates = [side.gate for side in dynakv.token_compressors(engine.model)]
    if learns_at(step, steps, rate.fix_ranks_from):
        for gate in gates:
            gate.learn()
    elif not all(gate.is_fixed for gate in gates):
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
