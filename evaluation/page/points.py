"""The rows of records as points of series: one method at several budgets."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ojakv import PRESETS, OjaKVConfig

from ..methods import FULL, method_name
from ..peers import PEERS
from ..peers.peer import EVICTION, LOW_RANK, QUANTIZATION
from ..scores import by_points, rows_of

LEARNED, ONLINE, FIXED, BITS, WHOLE = "learned", "online bases", "fixed bases", "planned bits", "uncompressed"
# Family → the marker that stands for it, in the order of the legend.
MARKERS = {
    LEARNED: "star",
    BITS: "circle",
    ONLINE: "triangle",
    FIXED: "square",
    LOW_RANK: "diamond",
    QUANTIZATION: "cross",
    EVICTION: "minus",
}
_BUDGET = re.compile(r" (?:at (?:the bytes of )?)?(?:\d+\.?\d*)$| at the bytes of .*$")
_BITS = re.compile(r"-int\d$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One row: a method at one budget on one text.

    Attributes:
        series: the method without its budget.
        values: field → value, such as `kl`, `perplexity_ratio`, `top1` and their `_low` and `_high`.
    """

    label: str
    series: str
    family: str
    dataset: str
    rate: float
    values: Mapping[str, float]

    def interval(self, field: str) -> tuple[float, float]:
        """Its bounds; the value twice where there are none."""
        value = self.values[field]
        return self.values.get(f"{field}_low", value), self.values.get(f"{field}_high", value)


def points_of(records: Iterable[Mapping[str, Any]]) -> list[Point]:
    """All rows that say bytes and a divergence; of equal ones the last record's."""
    found: dict[tuple[str, str], Point] = {}
    for record in records:
        families = _Families(record["config"] or {})
        for row in rows_of(by_points(record)):
            if not {"method", "dataset", "rate", "kl"} <= row.keys() or row.get("what", "") != "":
                continue
            values = {key: value for key, value in row.items() if isinstance(value, int | float)}
            point = Point(
                label=shown(row["method"]),
                series=shown(series_of(row["method"])),
                family=families.of(row["method"]),
                dataset=row["dataset"],
                rate=row["rate"],
                values=values,
            )
            found[row["method"], row["dataset"]] = point
    return list(found.values())


def series_of(label: str) -> str:
    """The method's label without its budget: of integers, without their bits."""
    return _BITS.sub("-int*", _BUDGET.sub("", label))


def shown(label: str) -> str:
    """A label as the page shows it."""
    return label.replace("cache_dtype=", "")


def datasets_of(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(point.dataset for point in points))


def front(points: Sequence[Point], field: str = "kl") -> list[Point]:
    """Those than which no other has both fewer bytes and less of `field`, by rising bytes."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (each.rate, each.values[field])):
        if point.family != WHOLE and (not best or point.values[field] < best[-1].values[field]):
            best.append(point)
    return best


class _Families:
    """Which family each method of a configuration is of."""

    def __init__(self, config: Mapping[str, Any]):
        self._found: dict[str, str] = {}
        for method in config.get("methods", []):
            if not isinstance(method, Mapping):
                continue
            settings = method.get("settings") or {}
            name = method_name(method.get("label"), method.get("preset") or method.get("peer"), settings)
            self._found[name] = _family(method, settings)

    def of(self, label: str) -> str:
        if label == FULL:
            return WHOLE
        fitting = [name for name in self._found if label == name or label.startswith(f"{name} ")]
        if fitting:
            return self._found[max(fitting, key=len)]
        for kind, names in (("preset", PRESETS), ("peer", PEERS)):  # records that list methods otherwise
            known = [name for name in names if label == name or label.startswith(f"{name} ")]
            if known:
                return _family({kind: max(known, key=len)}, {})
        return LEARNED


def _family(method: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    if method.get("checkpoint"):
        return LEARNED
    if method.get("peer"):
        return PEERS[method["peer"]].family
    config = OjaKVConfig.preset(method["preset"], **settings)
    if config.has_plan:
        return BITS
    return ONLINE if config.follows_text else FIXED
