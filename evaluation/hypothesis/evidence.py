"""What the verdicts rest on: losses of every setting on every window, paired, with intervals.

Shapes: N windows.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowrank_kv.utils.intervals import clusters_of, interval, squared_error, student_quantile

from ..scores import WindowScore, held_share
from .ranks import KEYS, VALUES
from .settings import Setting


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A relative increase of perplexity (0.01 is 1 %), and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """As text: the increase in per cent, its interval in brackets."""
        if math.isinf(self.high):
            return f"{_percent(self.value)} (too few windows for an interval)"
        return f"{_percent(self.value)} ({_percent(self.low)} to {_percent(self.high)})"

    @classmethod
    def of_differences(cls, difference_N: Tensor, cluster_N: Tensor) -> "Estimate":
        """exp of the mean of differences of losses, less one; a single one has no bounds.

        Args:
            cluster_N: int64, differences of one cluster are drawn together.
        """
        several = len(difference_N) > 1
        low, high = interval(difference_N, cluster_N=cluster_N) if several else (-math.inf, math.inf)
        return cls(*(math.expm1(float(each)) for each in (difference_N.mean(), low, high)))

    @classmethod
    def of_groups(cls, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> "Estimate":
        """exp of the difference of two means, less one (Welch's interval, at the fewest degrees of freedom).

        Args:
            one, other: values and their clusters.
        """
        difference = float(one[0].mean() - other[0].mean())
        (one_error, one_clusters), (other_error, other_clusters) = squared_error(*one), squared_error(*other)
        fewest, width = min(one_clusters, other_clusters), math.inf
        if fewest > 1:
            width = student_quantile(fewest - 1) * math.sqrt(one_error + other_error)
        return cls(*(math.expm1(each) for each in (difference, difference - width, difference + width)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One setting.

    Attributes:
        shares: ``keys``, ``values`` → mean r / d; 1 where they are not compressed.
        scores: text → each window's.
        documents: text → the document that each window is of.
    """

    setting: Setting
    shares: dict[str, float]
    scores: dict[str, list[WindowScore]]
    documents: dict[str, Sequence[int]]

    @property
    def byte_rate(self) -> float:
        """Bytes held over those of uncompressed caches."""
        return held_share([score for each in self.scores.values() for score in each])

    def losses(self, texts: Iterable[str] | None = None) -> Tensor:
        """Loss less that of the uncompressed model, (N,) fp64, on these texts; on all by default."""
        chosen = self.scores if texts is None else {text: self.scores[text] for text in texts}
        scores = [score for each in chosen.values() for score in each]
        return torch.tensor([score.loss - score.full_loss for score in scores], dtype=torch.float64)

    def clusters(self, texts: Iterable[str] | None = None) -> Tensor:
        """Which of these losses are drawn together, (N,) int64."""
        chosen = self.scores if texts is None else texts
        return clusters_of([self.documents[text][: len(self.scores[text])] for text in chosen])

    def increase(self, texts: Iterable[str] | None = None) -> Estimate:
        """Of perplexity, over the uncompressed model's."""
        return Estimate.of_differences(self.losses(texts), self.clusters(texts))

    def against(self, other: "Measured") -> Estimate:
        """Of perplexity, over the other setting's on the same windows."""
        return Estimate.of_differences(self.losses() - other.losses(), self.clusters())

    def is_at_most(self, share: float) -> bool:
        """Whether both keys and values are compressed to a mean r / d of at most `share`. Ranks that a level sets meet it
        but for a part of one rank, which counts as met."""
        if self.setting.ranks == "energy":
            return all(self.shares[side] <= share + 1e-9 for side in (KEYS, VALUES))
        return self.setting.sides == "both" and self.setting.level <= share


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadRow:
    """One head's keys on one side of the rotation, or its values.

    Attributes:
        rope: ``pre`` or ``post``; ``-`` of values.
        ranks: threshold of energy → least rank.
        captured: share of the energy in the first D/16, 2D/16, … components.
        kl: KL to the uncompressed model, nats, where only this head is compressed to the modest rank; None if not measured.
    """

    layer: int
    head: int
    side: str
    rope: str
    ranks: dict[float, int]
    captured: list[float]
    kl: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that was measured.

    Attributes:
        layer_kl: (layer, side) → KL where only that is compressed to the modest rank; empty if not measured.
    """

    head_dim: int
    settings: Sequence[Measured]
    heads: Sequence[HeadRow]
    layer_kl: dict[tuple[int, str], float]

    def find(self, **fields) -> list[Measured]:
        """The settings that agree with these fields, in the order of their levels."""
        found = [
            each for each in self.settings if all(getattr(each.setting, key) == value for key, value in fields.items())
        ]
        return sorted(found, key=lambda each: each.setting.level)

    def heads_of(self, side: str, rope: str) -> list[HeadRow]:
        """The heads' keys on a side of the rotation, or their values (rope ``-``)."""
        return [row for row in self.heads if (row.side, row.rope) == (side, rope)]


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %".replace("-", "−") if abs(value) < 10 else f"{value + 1:.0f}-fold"
