"""Ranks of nested truncation (MatryoshkaKV): drawn at random in training, allocated to a budget at its end.

Shapes: B batch, T tokens, C joint width.
"""

import math
import random

import torch
from torch import Tensor
from transformers import PreTrainedModel

import dynakv
from dynakv.nested_rank import NestedRank
from lowrank_kv.bases.rank_allocation import waterfill_ranks

from .data import Batch
from .validation import run_uncached


def draw_ranks(model: PreTrainedModel, seed: str) -> None:
    """Draw, for each layer's keys and values apart, what the next pass keeps: any multiple of the granularity.

    Args:
        model: attached, with ``rank_policy: nested``.
        seed: the same for all processes, another for every step, so that a resumed run draws what it would have.
    """
    generator = random.Random(seed)
    for side in dynakv.token_compressors(model):
        groups = math.ceil(side.width / side.config.granularity)
        side.gate.drawn = min(side.width, side.config.granularity * generator.randint(1, groups))


@torch.no_grad()
def allocate_ranks(model: PreTrainedModel, batches: list[Batch], rate: float) -> float:
    """Give every layer's keys and values a rank for inference, by water-filling of relative energies; returns the rate.

    The paper lowers ranks greedily, each time where the output changes least; that takes a pass for every candidate, where
    this takes one.

    Args:
        model: attached, with ``rank_policy: nested``.
        batches: text of the training distribution, on which the energies of the trained coefficients are measured.
        rate: share of all coefficients to keep, in (0, 1].
    """
    _measure_energies(model, batches)
    sides = dynakv.token_compressors(model)
    energies = [side.gate.energies().cpu() for side in sides]
    multiple = sides[0].config.granularity  # no other rank was drawn in training
    for side, rank in zip(sides, waterfill_ranks([e / e.sum() for e in energies], rate, multiple), strict=True):
        side.gate.rank.fill_(rank)
    return sum(int(side.gate.rank) for side in sides) / sum(side.width for side in sides)


def _measure_energies(model: PreTrainedModel, batches: list[Batch]) -> None:
    """Set the gates' energies to those of all coefficients on the blocks, none truncated."""
    gates = [side.gate for side in dynakv.token_compressors(model)]
    square_C = {gate: torch.zeros_like(gate.energy, dtype=torch.float64) for gate in gates}

    def add(gate: NestedRank, arguments: tuple[Tensor], rank_BT: Tensor) -> None:
        square_C[gate] += arguments[0].double().square().sum(dim=(0, 1))

    for gate in gates:
        gate.open()
    run_uncached(model, batches, dict.fromkeys(gates, add))
    tokens = sum(batch.ids_BT.numel() for batch in batches)
    for gate in gates:
        gate.energy.copy_(square_C[gate] / tokens)
