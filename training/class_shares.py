"""How the tokens of a text are divided into classes by a compressor's plans of bits, which says what they take."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import dynakv
from dynakv.compressor import TokenCompressor
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
    counts = {each: Counter() for each in compressors if has_classes(each)}

    def count(compressor: TokenCompressor, arguments: tuple[Tensor, ...], _: Any) -> None:
        basis_CC, _ = compressor.projection.fixed_matrices(torch.float32, arguments[0].device)
        coef_NC = arguments[0].float().flatten(0, -2) @ basis_CC
        counts[compressor].update(compressor.gate.plan.classes(coef_NC).tolist())

    run_uncached(model, batches, dict.fromkeys(counts, count))
    for compressor, found in counts.items():
        classes = len(compressor.gate.plan.plans)
        compressor.gate.set_shares([found[k] / found.total() for k in range(classes)])
    return {"text": text, "hard_rate": sum(each.gate.rate for each in compressors) / len(compressors)}
