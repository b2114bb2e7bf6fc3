"""Uncached passes over text with hard masks, as inference computes it: to measure a compressor, or to hook its modules."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from dynakv.objective import RateRecorder
from lowrank_kv.utils.eval_mode import evaluating

from .data import Batch
from .distillation import summed_kl, teacher_logits


@torch.no_grad()
def measure(model: PreTrainedModel, batches: Iterable[Batch]) -> dict[str, Any]:
    """Hard retain rate, perplexity and divergence over text, through the uncached hard mask.

    Returns:
        ``hard_rate``, ``perplexity`` and ``kl`` (of the uncompressed model's predictions from these, in nats), averaged over
        all tokens and over all that are predicted; ``layer_rates``, the hard rate of each layer's ``keys`` and ``values``,
        to four places.
    """
    loss, kl, predicted, rates, layers = 0.0, 0.0, 0, [], []
    with evaluating(model), RateRecorder(model) as recorder:
        for batch in batches:
            batch = batch.to(model.device)
            teacher = teacher_logits(model, batch.inputs)
            logits = model(**batch.inputs, use_cache=False).logits
            kl += float(summed_kl(logits, teacher, batch.targets))
            targets = batch.targets.flatten()
            loss += float(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="sum"))
            predicted += int((targets >= 0).sum())
            found = recorder.rates()
            rates.append(found.hard)
            layers.append(found.hard_L2)
    keys_L, values_L = torch.stack(layers).mean(dim=0).T.tolist()
    return {
        "hard_rate": sum(rates) / len(rates),
        "perplexity": math.exp(loss / max(predicted, 1)),
        "kl": kl / max(predicted, 1),
        "layer_rates": {
            "keys": [round(rate, 4) for rate in keys_L],
            "values": [round(rate, 4) for rate in values_L],
        },
    }


@torch.no_grad()
def run_uncached(model: PreTrainedModel, batches: Iterable[Batch], hooks: Mapping[nn.Module, Callable]) -> None:
    """Run the model's uncached path, hard masks included, over all blocks.

    Args:
        model: attached.
        hooks: module → its forward hook, called with (module, arguments, output).
    """
    registered = [module.register_forward_hook(hook) for module, hook in hooks.items()]
    try:
        with evaluating(model):
            for batch in batches:
                model.base_model(**batch.to(model.device).inputs, use_cache=False)
    finally:
        for hook in registered:
            hook.remove()
