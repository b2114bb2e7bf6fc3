"""The page: its sections from records, in the template."""

import datetime
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lowrank_kv.utils.errors import UserError

from ..hypothesis.ranks import STATE_NAMES
from . import curves, fronts, sentence
from .alike import check_alike
from .bars import bars, has_one_budget, horizontal
from .points import WHOLE, Point, datasets_of, front, points_of, series_of
from .tasks import task_table

MEASURES = {
    "kl": "KL, nats",
    "perplexity_ratio": "perplexity ratio",
    "top1": "equal top-1",
}
MOST_LINES = 6  # of a figure of allocations
BUDGETS = (0.3, 0.2, 0.1, 0.06)


def page(records: Sequence[Mapping[str, Any]], *, template: str = "report.html.jinja", **more: Any) -> str:
    """The HTML of one or several records.

    Args:
        template: the report's, or one beside it that extends it.
        more: what such a template shows; `title` takes the place of the report's.

    Raises:
        UserError: none of them has anything that the page shows, or they measured what cannot stand side by side.
    """
    check_alike(records)
    points, tasks = points_of(records), task_table(records)
    verdicts = [record for record in records if "verdicts" in record["summary"]]
    if not points and not verdicts and tasks is None:
        raise UserError(
            "none of the records compares methods; name those of `lowrank-kv compare`, `tasks` or `hypothesis`, "
            "the last one when it is done"
        )
    newest = max(records, key=lambda record: record["run_id"])
    anatomies = [record["summary"]["anatomy"] for record in records if "anatomy" in record["summary"]]
    values = {
        "title": f"KV caches of {(newest['config'] or {}).get('model', 'a model')}",
        "runs": [_run(record) for record in records],
        **(_comparison(points) if points else {}),
        "anatomy": _anatomy(anatomies[-1]) if anatomies else None,
        "tasks": tasks,
        "hypotheses": [_hypothesis(record) for record in verdicts],
    }
    return _templates().get_template(template).render(values | more)


def _run(record: Mapping[str, Any]) -> dict[str, Any]:
    begun = datetime.datetime.strptime(record["run_id"][:15], "%Y%m%dT%H%M%S")
    return {
        "id": record["run_id"],
        "begun": f"{begun:%d %B %Y, %H:%M} UTC",
        "command": " ".join(record["command"]),
        "commit": (record["code"] or {}).get("commit"),
        "dirty": (record["code"] or {}).get("dirty"),
        "config": {key: value for key, value in (record["config"] or {}).items() if not isinstance(value, list | dict)},
        "inputs": record["inputs"],
        "environment": record["environment"] or {},
        "n": record["n"] or {},
    }


def _comparison(points: Sequence[Point]) -> dict[str, Any]:
    """The leaderboard and the fronts."""
    colours, datasets = fronts.colours_of(points), datasets_of(points)
    by_text = {name: [point for point in points if point.dataset == name] for name in datasets}
    means = fronts.mean_points(points, "kl") if len(datasets) > 1 else []
    panels = []
    groups = ({"mean of all texts": means} if means else {}) | by_text
    for name, found in groups.items():
        if sum(point.family != WHOLE for point in found) < 2:
            continue
        if has_one_budget(found):
            drawn, beyond = bars(found, colours, field="kl", label=f"KL by method, {name}"), []
        else:
            drawn, beyond = fronts.panel(found, colours, field="kl", y_label="KL to the full cache, nats")
        panels.append({"name": name, "drawing": Markup(drawn), "beyond": beyond})
    return {
        "panels": panels,
        "legend": [(family, Markup(drawn)) for family, drawn in fronts.legend(points)],
        "rows": _leaderboard(points, datasets, colours),
        "datasets": datasets,
        "best": _best(means if len(datasets) > 1 else points),
        "scored": {name: int(min(point.values.get("scored", 0) for point in found)) for name, found in by_text.items()},
        "documents": {
            name: min(point.values.get("documents", 0) for point in found) for name, found in by_text.items()
        },
    }


def _leaderboard(points: Sequence[Point], datasets: Sequence[str], colours: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row for each method and budget: bytes, means over texts, and the divergence on each text with its interval. A method
    that was not measured on all texts has no means, and stands behind those of its bytes that have."""
    by_label: dict[str, dict[str, Point]] = {}
    for point in points:
        by_label.setdefault(point.label, {})[point.dataset] = point
    on_front = {each.label for name in datasets for each in front([p for p in points if p.dataset == name])}
    rows = []
    for label, found in by_label.items():
        any_point = next(iter(found.values()))
        rows.append(
            {
                "label": label,
                "family": any_point.family,
                "colour": colours.get(any_point.series, "rest"),
                "front": label in on_front,
                "rate": sum(point.rate for point in found.values()) / len(found),
                "measures": {
                    key: sum(point.values[key] for point in found.values()) / len(found)
                    for key in MEASURES
                    if len(found) == len(datasets) and all(key in point.values for point in found.values())
                },
                "texts": [
                    (found[name].values["kl"], *found[name].interval("kl")) if name in found else None
                    for name in datasets
                ],
            }
        )
    return sorted(rows, key=lambda row: (-round(row["rate"], 2), row["measures"].get("kl", math.inf)))


def _best(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The method of least mean divergence within each budget."""
    found = []
    for budget in BUDGETS:
        within = [point for point in points if point.rate <= budget and point.family != WHOLE]
        by_label: dict[str, list[float]] = {}
        for point in within:
            by_label.setdefault(point.label, []).append(point.values["kl"])
        means = {label: sum(values) / len(values) for label, values in by_label.items()}
        if means:
            label = min(means, key=means.get)
            rate = next(point.rate for point in within if point.label == label)
            found.append({"budget": budget, "label": label, "rate": rate, "kl": means[label]})
    return [each for i, each in enumerate(found) if i + 1 == len(found) or each["label"] != found[i + 1]["label"]]


def _anatomy(found: Mapping[str, Any]) -> dict[str, Any]:
    tokens, layers = found["sentence"]["tokens"], found["allocations"]["layers"]
    sentences = [
        {
            "name": label,
            "bars": Markup(sentence.token_bars(tokens, each, label)),
            "map": Markup(sentence.heat_map(tokens, layers, each, label)),
            "claims": sentence.in_words(each),
        }
        for label, each in found["sentence"]["methods"].items()
    ]
    chosen = _chosen(found["allocations"]["methods"])
    pairs = [each for each in found["allocations"]["correlations"] if set(each["methods"]) <= chosen.keys()]
    moving = {label: f"c{i % fronts.COLOURS}" for i, label in enumerate(found["residuals"])}
    return {
        "text": found["sentence"]["text"],
        "sentences": sentences,
        "spectra": [
            {"name": each["states"], "drawing": Markup(curves.spectrum(each)), "words": curves.spectrum_words(each)}
            for each in found["spectra"]
        ],
        "allocations": [
            {"name": side, "drawing": Markup(curves.allocation(found["allocations"], side, chosen))}
            for side in ("keys", "values")
            if chosen
        ],
        "correlations": pairs,
        "residuals": [
            {"name": side, "drawing": Markup(curves.residual(found["residuals"], side, moving))}
            for side in ("keys", "values")
            if moving
        ],
    }


def _chosen(methods: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, str]:
    """Of each series the budget nearest to the median of all, at most :data:`MOST_LINES`; label → class of its colour."""
    sizes = {label: sum(each["keys"] + each["values"]) / len(each["keys"]) / 2 for label, each in methods.items()}
    middle = sorted(sizes.values())[len(sizes) // 2] if sizes else 0.0
    nearest: dict[str, str] = {}
    for label in sorted(sizes, key=lambda each: abs(sizes[each] - middle)):
        nearest.setdefault(series_of(label), label)
    uneven = sorted(
        nearest.values(), key=lambda label: -len({round(value, 3) for value in methods[label]["keys"]})
    )  # those that treat layers alike say nothing
    return {label: f"c{i}" for i, label in enumerate(uneven[:MOST_LINES])}


def _hypothesis(record: Mapping[str, Any]) -> dict[str, Any]:
    rows = [row for row in record["rows"] if row.get("what") == "perplexity"]
    last = rows[-1]["dataset"]
    ladder = [
        (row["method"], row["perplexity_ratio"] - 1, "c0" if row["group"] in ("rank", "energy") else "rest")
        for row in rows
        if row["dataset"] == last
    ]
    heads = [row for row in record["rows"] if row.get("what") == "head"]
    layers = [row for row in record["rows"] if row.get("what") == "layer"]
    maps = []
    for (side, rope), name in STATE_NAMES.items():
        chosen = [row for row in heads if (row["side"], row["rope"]) == (side, rope)]
        field = sorted(key for key in chosen[0] if key.startswith("rank_"))[:2][-1]  # a run may have one threshold only
        most = max(row[field] for row in heads)
        maps.append(Markup(curves.head_map(chosen, field, most, f"rank for {field[5:]} % of the energy: {name}")))
    sensitivity = [
        {
            "name": side,
            "drawing": Markup(
                horizontal(
                    [(f"layer {row['layer']}", row["kl_alone"], "c0") for row in layers if row["side"] == side],
                    label=f"KL where only the {side} of one layer are compressed",
                    form="{:.4f}",
                )
            ),
        }
        for side in ("keys", "values")
        if layers
    ]
    return {
        "run": record["run_id"],
        "model": record["config"].get("model"),
        "verdicts": record["summary"]["verdicts"],
        "ladder": Markup(horizontal(ladder, label="Increase of perplexity of each setting", form="{:+.1%}", width=560)),
        "texts": last,
        "maps": maps,
        "sensitivity": sensitivity,
    }


@functools.cache
def _templates() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.ChainableUndefined)
