"""How the tokens of a text are divided into classes by a compressor's plans of bits, which says what they take.

Shapes: N tokens of the text.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

import dynakv
from dynakv.compressor import TokenCompressor
from dynakv.planned_bits import PlannedBits
from lowrank_kv.stores.token_plans import TokenPlans

from .data import Batch
from .engine import Engine
from .validation import run_uncached

_NEAR = 0.02  # how far, as a share, a rate may be from its target: tokens move from class to class one at a time
_HALVINGS = 50


class Told(NamedTuple):
    """By what the class of each token of a text is told, on the CPU.

    Attributes:
        score_N: fp32.
        bounds_K: between the scores of classes, rising; outside of a pass sharded ones are elsewhere.
    """

    score_N: Tensor
    bounds_K: Tensor

    def classes(self, shift: float) -> Tensor:
        """Of each token, (N,) int64, with all bounds moved."""
        return torch.bucketize(self.score_N, self.bounds_K + shift)


Sides = Mapping[PlannedBits, Told]


def has_classes(compressor: TokenCompressor) -> bool:
    """Whether its tokens take different numbers of bytes, by plans."""
    return compressor.config.has_plan and isinstance(compressor.gate.plan, TokenPlans)


def measure_class_shares(model: PreTrainedModel, batches: Iterable[Batch], text: str) -> dict[str, Any]:
    """Put the shares of classes of a text's tokens into the compressors, which changes nothing but what tokens are expected
    to take.

    Args:
        model: with compressors, some of which :func:`has_classes`.
        batches: of the text.
        text: its name.

    Returns:
        ``text``, and ``hard_rate``: bytes of a token of it over those of one in 16 bits.
    """
    return _put_shares(model, _told(model, batches), 0.0, text)


def calibrate_bounds(engine: Engine, batches: list[Batch], target: float, text: str) -> dict[str, Any]:
    """Move the bounds between classes, all by the same number, so that a text's tokens take `target`, and put their shares
    into the compressors.

    A bound is the logarithm of what a token has to cost to be worth more bytes. So this is another price of bytes, which
    training ends near, but not at. A layer's input depends on what earlier layers keep: a second pass corrects the first.

    Args:
        engine: with a model as :func:`measure_class_shares` takes it; all processes must call this with the same text.
        batches, text: of what was not trained on, and its name.
        target: bytes of a token over those of one in 16 bits.

    Returns:
        what :func:`measure_class_shares` does, and ``bounds_moved``, in nats. A warning says where no bounds bring the rate
        near its target.
    """
    model, moved = engine.model, 0.0
    for _ in range(2):
        told = _told(model, batches)
        shift = _shift_to(model, told, target)
        with engine.gather_full(engine.compressor_parameters(), write=True):
            for gate in told:
                gate.move_bounds(shift)
        moved += shift
    found = _put_shares(model, told, shift, text)
    if abs(found["hard_rate"] - target) > _NEAR * target:
        warnings.warn(
            f"tokens of {text} take {found['hard_rate']:.3f} of their bytes, for a target of {target:g}: no bounds between "
            f"classes bring that nearer; start from a plan for that rate, or ask for one that the plan reaches",
            stacklevel=2,
        )
    return found | {"bounds_moved": moved}


@torch.no_grad()
def _told(model: PreTrainedModel, batches: Iterable[Batch]) -> Sides:
    """Of each compressor that has several classes."""
    parts: dict[PlannedBits, list[Told]] = {
        each.gate: [] for each in dynakv.token_compressors(model) if has_classes(each)
    }

    def add(gate: PlannedBits, arguments: tuple[Tensor, ...], _: Any) -> None:
        plan = gate.plan
        parts[gate].append(Told(plan.gate.scores(arguments[0].flatten(0, -2)).cpu(), plan.bounds_K.cpu()))

    run_uncached(model, batches, dict.fromkeys(parts, add))
    return {gate: Told(torch.cat([each.score_N for each in found]), found[0].bounds_K) for gate, found in parts.items()}


def _shift_to(model: PreTrainedModel, told: Sides, target: float) -> float:
    """The least number that bounds have to be moved by for tokens to take no more than `target`; where none is enough, one
    that leaves all in the cheapest class."""
    sides = dynakv.token_compressors(model)

    def rate(shift: float) -> float:
        kept = 0.0
        for side in sides:
            gate = side.gate
            if gate not in told:
                kept += gate.rate * side.width
                continue
            size_N = gate.plan.size_K.cpu()[told[gate].classes(shift)]
            kept += float(gate.rate_of(size_N.double().mean())) * side.width
        return kept / sum(side.width for side in sides)

    low = min(float(each.score_N.min() - each.bounds_K.max()) for each in told.values())
    high = max(float(each.score_N.max() - each.bounds_K.min()) for each in told.values())
    if rate(low) <= target:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle) > target else (low, middle)
    return high


def _put_shares(model: PreTrainedModel, told: Sides, shift: float, text: str) -> dict[str, Any]:
    for gate, each in told.items():
        count_K = each.classes(shift).bincount(minlength=len(gate.plan.plans))
        gate.set_shares((count_K / len(each.score_N)).tolist())
    sides = dynakv.token_compressors(model)
    kept = sum(each.gate.rate * each.width for each in sides)
    return {"text": text, "hard_rate": kept / sum(each.width for each in sides)}
