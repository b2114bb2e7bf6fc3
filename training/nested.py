"""Ranks of nested truncation (MatryoshkaKV): drawn at random in training, allocated to a budget at its end."""

import math
import random

import torch
from transformers import PreTrainedModel

import dynakv
from lowrank.allocation import waterfill_ranks


def draw_ranks(model: PreTrainedModel, seed: str) -> None:
    """Draw, for each layer's keys and values apart, what the next pass keeps: any multiple of the granularity.

    Args:
        model: attached, with ``truncation: nested``.
        seed: the same for all processes, another for every step, so that a resumed run draws what it would have.
    """
    generator = random.Random(seed)
    for side in dynakv.token_compressors(model):
        groups = math.ceil(side.width / side.config.granularity)
        side.gate.drawn = min(side.width, side.config.granularity * generator.randint(1, groups))


@torch.no_grad()
def allocate_ranks(model: PreTrainedModel, rate: float) -> float:
    """Give every layer's keys and values a rank for inference, by water-filling of relative energies; returns the rate.

    The paper lowers ranks greedily, each time where the output changes least; that takes a pass for every candidate, where
    this takes none.

    Args:
        model: attached, with ``truncation: nested``.
        rate: share of all coefficients to keep, in (0, 1].
    """
    sides = dynakv.token_compressors(model)
    energies = [side.gate.energies().cpu() for side in sides]
    multiple = sides[0].config.granularity  # no other rank was drawn in training
    for side, rank in zip(sides, waterfill_ranks([e / e.sum() for e in energies], rate, multiple), strict=True):
        side.gate.rank.fill_(rank)
    return sum(int(side.gate.rank) for side in sides) / sum(side.width for side in sides)
