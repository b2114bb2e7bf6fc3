"""Intervals of means: how far a figure may lie from that of other text of the same kind.

Shapes: N values, K resamples.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

LEAST_DOCUMENTS = 8
"""A bootstrap over fewer documents says little; of these on it draws documents."""

_RESAMPLES = 4000
_NORMAL_QUANTILE = 1.959964  # of 0.975


def clusters_of(documents: Sequence[Sequence[int]]) -> Tensor:
    """Which values are drawn together, (N,) int64: those of one document, where their text has :data:`LEAST_DOCUMENTS` or
    more. The values of a text of fewer are drawn one by one, and tell only of other windows of the same documents.

    Args:
        documents: of each text, the document that each of its values is of.
    """
    keys = [
        (text, document if len(set(those)) >= LEAST_DOCUMENTS else index)
        for text, those in enumerate(documents)
        for index, document in enumerate(those)
    ]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys], dtype=torch.int64)


def interval(
    value_N: Tensor,
    *,
    weight_N: Tensor | None = None,
    cluster_N: Tensor | None = None,
    possible: tuple[float, float] | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """The bounds of a 95 % interval of the mean; paired where the values are differences of pairs.

    A bootstrap of few values is too narrow: of five it covers the mean in 84 of 100 cases instead of 95. The distances of
    its quantiles from the mean are therefore enlarged, so that of normal values the interval is Student's (after the
    expanded percentile interval of Hesterberg, arXiv 1411.5279).

    Args:
        value_N: at least two, or of at least two clusters.
        weight_N: how much each counts, such as the tokens that it is a mean of; by default all alike.
        cluster_N: int64, values of one cluster are drawn together; by default each is one of its own.
        possible: the least and the largest that a value can be. With it the interval is at least :func:`least_interval`:
            where the means of all clusters are equal, those of all resamples are, too.
    """
    generator = torch.Generator().manual_seed(seed)
    value_N, count_N = _sums(value_N, weight_N, cluster_N)
    drawn_KN = torch.randint(len(value_N), (_RESAMPLES, len(value_N)), generator=generator)
    mean_K = value_N[drawn_KN].sum(dim=1) / count_N[drawn_KN].sum(dim=1)
    low, high = torch.quantile(mean_K, torch.tensor([0.025, 0.975], dtype=value_N.dtype))
    clusters, mean = len(value_N), value_N.sum() / count_N.sum()
    wider = student_quantile(clusters - 1) / _NORMAL_QUANTILE * math.sqrt(clusters / (clusters - 1))
    low, high = mean + (low - mean) * wider, mean + (high - mean) * wider
    if possible is None:
        return low, high
    least = least_interval(float(mean), clusters, possible)
    return low.clamp(max=least[0]), high.clamp(min=least[1])


def least_interval(mean: float, count: int, possible: tuple[float, float]) -> tuple[float, float]:
    """The bounds that a 95 % interval of a mean of `count` clusters has at least.

    Clusters of a kind that was not met can be a share of z² / (count + z²) of all (Wilson, Journal of the American
    Statistical Association 22, 1927), and each of them anything that is possible.

    Args:
        possible: the least and the largest that a value can be.
    """
    unmet = _NORMAL_QUANTILE**2 / (count + _NORMAL_QUANTILE**2)
    low, high = (mean + unmet * (bound - mean) for bound in possible)
    return low, high


def squared_error(value_N: Tensor, cluster_N: Tensor) -> tuple[float, int]:
    """The square of the standard error of a mean, and the number of clusters that it is of; infinite of a single one.

    Args:
        value_N: fp64.
        cluster_N: int64, which values belong together.
    """
    sum_N, count_N = _sums(value_N, None, cluster_N)
    clusters = len(sum_N)
    if clusters == 1:
        return math.inf, 1
    apart_N = (sum_N - count_N * value_N.mean()) / len(value_N)
    return float(apart_N.square().sum()) * clusters / (clusters - 1), clusters


def _sums(value_N: Tensor, weight_N: Tensor | None, cluster_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of each cluster the weighted sum of its values, and the sum of their weights."""
    count_N = torch.ones_like(value_N) if weight_N is None else weight_N.to(value_N.dtype)
    value_N = value_N * count_N
    if cluster_N is None:
        return value_N, count_N
    cluster_N = torch.unique(cluster_N, return_inverse=True)[1]
    sums = torch.zeros(int(cluster_N.max()) + 1, dtype=value_N.dtype)
    return sums.index_add(0, cluster_N, value_N), sums.index_add(0, cluster_N, count_N)


def student_quantile(freedom: int) -> float:
    """The 0.975 quantile of Student's t, exact for one and two degrees of freedom; 0.0039 too small for three, and within
    0.0009 for more."""
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


def with_interval(row: Mapping[str, Any], key: str, form: str) -> str:
    """A mean and its interval in words: `key` of a record's row, and where it has them `key_low` and `key_high`."""
    if f"{key}_low" not in row:  # of a single value
        return f"{row[key]:{form}}"
    return f"{row[key]:{form}} ({row[f'{key}_low']:{form}} to {row[f'{key}_high']:{form}})"
