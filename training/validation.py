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
from lowrank_kv.utils.intervals import clusters_of, interval

from .data import Batch
from .distillation import read_by_teacher, summed_kl


@torch.no_grad()
def measure(model: PreTrainedModel, batches: Iterable[Batch]) -> dict[str, Any]:
    """Hard retain rate, perplexity and divergence over text, through the uncached hard mask.

    Returns:
        ``hard_rate``, ``perplexity`` and ``kl`` (of the uncompressed model's predictions from these, in nats), averaged over
        all tokens and over all that are predicted; ``scored``, how many these are; where there are several batches, the
        bounds of 95 % intervals, ``perplexity_low`` and so on, over batches, or over documents where there are enough
        (:func:`lowrank_kv.utils.intervals.clusters_of`); ``layer_rates``, the hard rate of each layer's ``keys`` and
        ``values``, to four places.
    """
    losses, divergences, counts, documents, rates, layers = [], [], [], [], [], []
    with evaluating(model), RateRecorder(model) as recorder:
        for batch in batches:
            batch = batch.to(model.device)
            teacher, more = read_by_teacher(model, batch.inputs, logits=True)
            logits = model(**batch.inputs, **more, use_cache=False).logits
            divergences.append(float(summed_kl(logits, teacher, batch.targets)))
            targets = batch.targets.flatten()
            losses.append(float(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="sum")))
            counts.append(int((targets >= 0).sum()))
            documents.append(batch.document)
            found = recorder.rates()
            rates.append(found.hard)
            layers.append(found.hard_L2)
    keys_L, values_L = torch.stack(layers).mean(dim=0).T.tolist()
    return {
        "hard_rate": sum(rates) / len(rates),
        "perplexity": math.exp(sum(losses) / max(sum(counts), 1)),
        "kl": sum(divergences) / max(sum(counts), 1),
        "scored": sum(counts),
        **_bounds(losses, divergences, counts, documents),
        "layer_rates": {
            "keys": [round(rate, 4) for rate in keys_L],
            "values": [round(rate, 4) for rate in values_L],
        },
    }


def _bounds(
    losses: list[float], divergences: list[float], counts: list[int], documents: list[int | None]
) -> dict[str, float]:
    """The bounds of perplexity and KL, from sums over the predicted tokens of each batch."""
    count_N = torch.tensor(counts, dtype=torch.float64)
    predicts_N = count_N > 0
    if predicts_N.sum() < 2:
        return {}
    cluster_N = None if None in documents else clusters_of([documents])[predicts_N]
    found = {}
    for name, sums, shown in (("perplexity", losses, torch.exp), ("kl", divergences, lambda kl: kl.clamp(min=0))):
        mean_N = torch.tensor(sums, dtype=torch.float64)[predicts_N] / count_N[predicts_N]
        low, high = interval(mean_N, weight_N=count_N[predicts_N], cluster_N=cluster_N)
        found |= {f"{name}_low": float(shown(low)), f"{name}_high": float(shown(high))}
    return found


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
                inputs = batch.to(model.device).inputs
                _, more = read_by_teacher(model, inputs, logits=False)
                model.base_model(**inputs, **more, use_cache=False)
    finally:
        for hook in registered:
            hook.remove()
