"""How faithful a cache is: what the model says through it, beside what it says with all of its keys and values.

Perplexity tells how well a text is predicted, and may fall where a cache is wrong; the divergence from the uncompressed
model's predictions may not.

Shapes: T tokens of a window, S scored predictions, V vocabulary, N windows, K resamples.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PreTrainedModel

from lowrank_kv.hf.geometry import geometry_of

from .reading import cache_bytes, read_through

_RESAMPLES = 4000
_NORMAL_QUANTILE = 1.959964  # of 0.975
_POSSIBLE = {"top1": (0, 1)}  # what a mean can be, where not anything from 0 on


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowScore:
    """One method on one window of a text, beside the uncompressed model; means over its scored predictions.

    Attributes:
        loss, full_loss: cross-entropy through the cache, and without one in one pass, nats.
        kl: KL(uncompressed ‖ this), nats.
        top1: share of predictions whose most likely token is the uncompressed model's.
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


def score_window(
    model: PreTrainedModel,
    ids_T: Tensor,
    full_SV: Tensor,
    make_cache: Callable[[], Cache],
    *,
    prefix: int,
    step: int,
) -> WindowScore:
    """Score one window, read into a fresh cache; see :func:`evaluation.reading.read_through`.

    Args:
        full_SV: the uncompressed model's log-probabilities of the same predictions.
    """
    geometry, cache = geometry_of(model), make_cache()
    log_SV = read_through(model, ids_T, cache, prefix=prefix, step=step)
    target_S = ids_T[-len(log_SV) :]
    return WindowScore(
        loss=float(F.nll_loss(log_SV, target_S)),
        full_loss=float(F.nll_loss(full_SV, target_S)),
        kl=float(F.kl_div(log_SV, full_SV, reduction="batchmean", log_target=True)),
        top1=float((log_SV.argmax(-1) == full_SV.argmax(-1)).float().mean()),
        scored=len(target_S),
        cache_bytes=cache_bytes(cache, geometry.layers),
        full_bytes=geometry.full_nbytes(len(ids_T), model.dtype.itemsize),
    )


def summary(scores: Sequence[WindowScore]) -> dict[str, Any]:
    """Means over windows and their 95 % intervals (:func:`interval`, paired, over windows) as fields of a row.

    The perplexity ratio is exp of the mean difference of losses, window by window. One window has no interval. No interval
    reaches beyond what a mean can be.
    """
    columns = {
        "perplexity_ratio": torch.tensor([score.loss - score.full_loss for score in scores], dtype=torch.float64),
        "kl": torch.tensor([score.kl for score in scores], dtype=torch.float64),
        "top1": torch.tensor([score.top1 for score in scores], dtype=torch.float64),
    }
    row: dict[str, Any] = {
        "rate": held_share(scores),
        "cache_bytes": sum(score.cache_bytes for score in scores),
        "full_bytes": sum(score.full_bytes for score in scores),
        "perplexity": math.exp(sum(score.loss for score in scores) / len(scores)),
    }
    for name, value_N in columns.items():
        shown = torch.exp if name == "perplexity_ratio" else torch.Tensor.double
        row[name] = float(shown(value_N.mean()))
        if len(scores) > 1:
            bounds = (shown(bound).clamp(*_POSSIBLE.get(name, (0, torch.inf))) for bound in interval(value_N))
            row[f"{name}_low"], row[f"{name}_high"] = map(float, bounds)
    return row | {"windows": len(scores), "scored": sum(score.scored for score in scores)}


def with_interval(row: Mapping[str, Any], key: str, form: str) -> str:
    """A mean and its interval, where it has one."""
    if f"{key}_low" not in row:
        return f"{row[key]:{form}}"
    return f"{row[key]:{form}} ({row[f'{key}_low']:{form}} to {row[f'{key}_high']:{form}})"


def held_share(scores: Sequence[WindowScore]) -> float:
    """Bytes held over those of uncompressed caches, all windows together."""
    return sum(score.cache_bytes for score in scores) / sum(score.full_bytes for score in scores)


def interval(value_N: Tensor, *, cluster_N: Tensor | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The bounds of a 95 % interval of the mean; paired where the values are differences of pairs.

    A bootstrap of few values is too narrow: of five it covers the mean in 84 of 100 cases instead of 95. The distances of
    its quantiles from the mean are therefore enlarged, so that of normal values the interval is Student's (after the
    expanded percentile interval of Hesterberg, arXiv 1411.5279).

    Args:
        value_N: at least two, or of at least two clusters.
        cluster_N: int64, values of one cluster are drawn together; by default each is one of its own.
    """
    generator = torch.Generator().manual_seed(seed)
    count_N = torch.ones_like(value_N)
    if cluster_N is not None:
        cluster_N = torch.unique(cluster_N, return_inverse=True)[1]
        sums = torch.zeros(int(cluster_N.max()) + 1, dtype=value_N.dtype)
        value_N, count_N = (sums.index_add(0, cluster_N, each) for each in (value_N, count_N))
    drawn_KN = torch.randint(len(value_N), (_RESAMPLES, len(value_N)), generator=generator)
    mean_K = value_N[drawn_KN].sum(dim=1) / count_N[drawn_KN].sum(dim=1)
    low, high = torch.quantile(mean_K, torch.tensor([0.025, 0.975], dtype=value_N.dtype))
    clusters, mean = len(value_N), value_N.sum() / count_N.sum()
    wider = student_quantile(clusters - 1) / _NORMAL_QUANTILE * math.sqrt(clusters / (clusters - 1))
    return mean + (low - mean) * wider, mean + (high - mean) * wider


def student_quantile(freedom: int) -> float:
    """The 0.975 quantile of Student's t, exact for one and two degrees of freedom, else within 0.003."""
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025))
    z = _NORMAL_QUANTILE  # Cornish and Fisher's expansion (Abramowitz and Stegun, 26.7.5)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def rows_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a record, with intervals by :func:`interval` where it holds the windows that they rest on, whatever they
    were when it was written."""
    windows = {
        (each["method"], each["dataset"]): [WindowScore(**score) for score in each["windows"]]
        for each in (record.get("summary") or {}).get("windows", [])
    }
    rows = []
    for row in record["rows"]:
        scores = windows.get((row.get("method"), row.get("dataset")))
        bounds = {} if scores is None else summary(scores)
        rows.append(row | {key: value for key, value in bounds.items() if key.endswith(("_low", "_high"))})
    return rows


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: 1 where both order alike, −1 where oppositely; 0 where one of them does not vary."""
    centred = [_places(each) - (len(each) - 1) / 2 for each in (first, second)]
    norms = [float(torch.linalg.vector_norm(each)) for each in centred]
    return float(centred[0] @ centred[1]) / (norms[0] * norms[1]) if min(norms) > 0 else 0.0


def _places(values: Sequence[float]) -> Tensor:
    """Each value's place in their order, equal ones at the mean of theirs."""
    value_N = torch.tensor(list(values), dtype=torch.float64)
    below_N = (value_N[None] < value_N[:, None]).sum(1)
    equal_N = (value_N[None] == value_N[:, None]).sum(1)
    return below_N + (equal_N - 1) / 2
