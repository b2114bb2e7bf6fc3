"""How faithful a cache is: what the model says through it, beside what it says with all of its keys and values.

A prompt is read exactly, as it is in serving, and what follows it is scored. Perplexity tells how well a text is predicted,
and may fall where a cache is wrong; the divergence from the full cache's predictions may not.

Shapes: T tokens of a window, S scored predictions, V vocabulary, N windows.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, PreTrainedModel

from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from lowrank_kv.hf.geometry import geometry_of

from .perplexity import cache_bytes, check_split

_RESAMPLES = 4000


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowScore:
    """One method on one window of a text, beside the full cache; means over its scored predictions.

    Attributes:
        loss, full_loss: cross-entropy through the cache and through the full one, nats.
        kl: KL(full ‖ this), nats.
        top1: share of predictions whose most likely token is the full cache's.
        scored: predictions.
        cache_bytes, full_bytes: held by the cache, and by an uncompressed one, at the end of the window.
    """

    loss: float
    full_loss: float
    kl: float
    top1: float
    scored: int
    cache_bytes: int
    full_bytes: int


@torch.no_grad()
def fidelity(
    model: PreTrainedModel,
    windows_NT: Tensor,
    methods: Mapping[str, Callable[[], Cache]],
    *,
    prefix: int,
    step: int = MAX_DECODE_QUERIES,
) -> Iterator[tuple[str, WindowScore]]:
    """(method, score) of each window and method, window by window.

    Args:
        model: the model.
        windows_NT: token ids.
        methods: name → a maker of fresh caches, which read the prompt exactly.
        prefix: length of the prompt, below T.
        step: tokens read at a time after it.
    """
    check_split(model, windows_NT.shape[1], prefix)
    geometry = geometry_of(model)
    for window_T in tqdm(windows_NT, desc="windows", leave=False):
        ids = window_T[None].to(model.device)
        target_S = ids[0, prefix + 1 :]
        # The last prediction has no target, and the prompt's own is exact in every cache.
        full_SV = model(input_ids=ids, use_cache=False, logits_to_keep=len(target_S) + 1).logits[0, :-1]
        full_SV = full_SV.float().log_softmax(-1)
        for name, make_cache in methods.items():
            cache = make_cache()
            model(input_ids=ids[:, :prefix], past_key_values=cache, logits_to_keep=1)
            parts = ids[:, prefix:].split(step, dim=1)
            logits = [model(input_ids=part, past_key_values=cache).logits[0] for part in parts]
            log_SV = torch.cat(logits)[:-1].float().log_softmax(-1)
            yield (
                name,
                WindowScore(
                    loss=float(F.nll_loss(log_SV, target_S)),
                    full_loss=float(F.nll_loss(full_SV, target_S)),
                    kl=float(F.kl_div(log_SV, full_SV, reduction="batchmean", log_target=True)),
                    top1=float((log_SV.argmax(-1) == full_SV.argmax(-1)).float().mean()),
                    scored=len(target_S),
                    cache_bytes=cache_bytes(cache, geometry.layers),
                    full_bytes=geometry.full_nbytes(ids.shape[1], model.dtype.itemsize),
                ),
            )


def windows_of(ids_X: Tensor, length: int, count: int) -> Tensor:
    """`count` windows of `length` tokens, spread evenly over a text and not overlapping, (N, T); fewer if it is short."""
    count = min(count, len(ids_X) // length)
    stride = (len(ids_X) - length) // max(count - 1, 1)
    return torch.stack([ids_X[i * stride : i * stride + length] for i in range(count)])


def summary(scores: list[WindowScore], *, seed: int = 0) -> dict[str, Any]:
    """Means over windows and their 95 % intervals (a paired bootstrap over windows) as fields of a row.

    The perplexity ratio is exp of the mean difference of losses, window by window.
    """
    columns = {
        "perplexity_ratio": torch.tensor([score.loss - score.full_loss for score in scores], dtype=torch.float64),
        "kl": torch.tensor([score.kl for score in scores], dtype=torch.float64),
        "top1": torch.tensor([score.top1 for score in scores], dtype=torch.float64),
    }
    generator = torch.Generator().manual_seed(seed)
    drawn_KN = torch.randint(len(scores), (_RESAMPLES, len(scores)), generator=generator)
    row: dict[str, Any] = {
        "rate": sum(score.cache_bytes for score in scores) / sum(score.full_bytes for score in scores),
        "perplexity": math.exp(sum(score.loss for score in scores) / len(scores)),
    }
    for name, value_N in columns.items():
        shown = torch.exp if name == "perplexity_ratio" else torch.Tensor.double
        mean_K = value_N[drawn_KN].mean(dim=1)
        low, high = torch.quantile(mean_K, torch.tensor([0.025, 0.975], dtype=torch.float64))
        row[name] = float(shown(value_N.mean()))
        row[f"{name}_low"], row[f"{name}_high"] = float(shown(low)), float(shown(high))
    return row | {"windows": len(scores), "scored": sum(score.scored for score in scores)}
