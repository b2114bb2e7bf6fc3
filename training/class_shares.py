"""How the tokens of a text are divided into classes by a compressor's plans of bits, which says what they take."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import dynakv
from dynakv.compressor import TokenCompressor
from dynakv.planned_bits import PlannedBits
from lowrank_kv.stores.token_plans import TokenPlans

from .data import Batch
from .validation import run_uncached


def has_classes(compressor: TokenCompressor) -> bool:
    """Whether its tokens take different numbers of bytes, by plans."""
    return compressor.config.has_plan and isinstance(compressor.gate.plan, TokenPlans)


@torch.no_grad()
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
    compressors = dynakv.token_compressors(model)
    counts = {each.gate: Counter() for each in compressors if has_classes(each)}

    def count(gate: PlannedBits, arguments: tuple[Tensor, ...], _: Any) -> None:
        counts[gate].update(gate.plan.classes(arguments[0].flatten(0, -2)).tolist())

    run_uncached(model, batches, dict.fromkeys(counts, count))
    for gate, found in counts.items():
        gate.set_shares([found[k] / found.total() for k in range(len(gate.plan.plans))])
    kept = sum(each.gate.rate * each.width for each in compressors)
    return {"text": text, "hard_rate": kept / sum(each.width for each in compressors)}
