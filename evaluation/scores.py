"""How faithful a cache is: what the model says through it, beside what it says with all of its keys and values.

Perplexity tells how well a text is predicted, and may fall where a cache is wrong; the divergence from the uncompressed
model's predictions may not.

Shapes: T tokens of a window, S scored predictions, V vocabulary, N windows.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PreTrainedModel

from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.utils.intervals import clusters_of, interval, least_interval

from .methods import FULL
from .reading import cache_bytes, read_through

PER_CENT = {"score": (0, 100), "difference": (-100, 100)}  # of items of tasks
_SHARES = ("top1", "acc")  # how columns of shares of one begin


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
    cache: Cache,
    *,
    prefix: int,
    step: int,
) -> WindowScore:
    """Score one window, read into a cache; see :func:`evaluation.reading.read_through`.

    Args:
        full_SV: the uncompressed model's log-probabilities of the same predictions.
    """
    log_SV = read_through(model, ids_T, cache, prefix=prefix, step=step)
    return score_predictions(model, ids_T, full_SV, log_SV, cache)


def score_predictions(
    model: PreTrainedModel, ids_T: Tensor, full_SV: Tensor, log_SV: Tensor, cache: Cache
) -> WindowScore:
    """The same of predictions that were made.

    Args:
        log_SV: their log-probabilities.
        cache: that they were made through, at the end of the window.
    """
    geometry = geometry_of(model)
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


def summary(scores: Sequence[WindowScore], documents: Sequence[Sequence[int]] | None = None) -> dict[str, Any]:
    """Means over windows and their 95 % intervals (:func:`lowrank_kv.utils.intervals.interval`, paired) as fields of a row.

    The perplexity ratio is exp of the mean difference of losses, window by window. One window has no interval. No interval
    reaches beyond what a mean can be.

    Args:
        documents: of each text, the document that each of its windows is of: windows of one document are drawn together
            (:func:`lowrank_kv.utils.intervals.clusters_of`), and the row says of how many documents it is. None where an
            earlier record does not know: each window is drawn by itself.
    """
    cluster_N = None if documents is None else clusters_of(documents)
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
            found = interval(value_N, cluster_N=cluster_N)
            row[f"{name}_low"], row[f"{name}_high"] = (float(shown(bound).clamp(*possible(name))) for bound in found)
    row |= {"windows": len(scores), "scored": sum(score.scored for score in scores)}
    return row if documents is None else row | {"documents": sum(len(set(those)) for those in documents)}


def extent(row: Mapping[str, Any]) -> str:
    """The numbers of windows and documents behind a row, in words."""
    windows, documents = row["windows"], row["documents"]
    return f"{windows} window{'s' * (windows > 1)} of {documents} document{'s' * (documents > 1)}"


class HeldBytes(Protocol):
    """What a score says of bytes."""

    cache_bytes: int
    full_bytes: int


def held_share(scores: Sequence[HeldBytes]) -> float:
    """Bytes held over those of uncompressed caches, all windows or items together."""
    return sum(score.cache_bytes for score in scores) / sum(score.full_bytes for score in scores)


def rows_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a record, with intervals by :func:`summary` where it holds the windows that they rest on, whatever they
    were when it was written. Intervals of earlier records of tasks are widened to
    :func:`lowrank_kv.utils.intervals.least_interval`; where they do not say how many clusters they have, each item counts
    as one."""
    documents = (record.get("summary") or {}).get("documents", {})
    windows = {
        (each["method"], each["dataset"]): [WindowScore(**score) for score in each["windows"]]
        for each in (record.get("summary") or {}).get("windows", [])
    }
    rows = []
    for row in record["rows"]:
        scores = windows.get((row.get("method"), row.get("dataset")))
        bounds = {}
        if scores is not None:
            told = documents.get(row["dataset"])  # of all windows that were planned, also where a run was ended before
            bounds = summary(scores, None if told is None else [told["of"][: len(scores)]])
        found = row | {key: value for key, value in bounds.items() if key.endswith(("_low", "_high"))}
        rows.append(found | _least_bounds(row))
    return rows


def by_points(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of a sweep with each point's own name for its rows, in place of its recipe's, which several points share;
    another record as it is."""
    points = (record.get("summary") or {}).get("measured_by")
    if not isinstance(points, Mapping):
        return record
    names = list(points)
    texts = len(record["rows"]) // len(names)
    return {**record, "rows": [row | {"method": names[i // texts]} for i, row in enumerate(record["rows"])]}


def possible(name: str) -> tuple[float, float]:
    """The least and the largest that a mean of a column of this name can be."""
    return PER_CENT.get(name, (0, 1) if name.startswith(_SHARES) else (0, torch.inf))


def _least_bounds(row: Mapping[str, Any]) -> dict[str, float]:
    """Bounds of a row of tasks in place of narrower ones."""
    found = {}
    for name, reach in PER_CENT.items():
        low, high = f"{name}_low", f"{name}_high"
        is_itself = (row.get("method"), name) == (FULL, "difference")
        if low in row and "items" in row and not is_itself:
            least = least_interval(row[name], row.get("clusters", row["items"]), reach)
            found[low], found[high] = min(row[low], least[0]), max(row[high], least[1])
    return found


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
