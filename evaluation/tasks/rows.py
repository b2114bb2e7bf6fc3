"""Rows of a record and tables of tasks."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lowrank_kv.utils.intervals import interval, with_interval

from ..methods import FULL
from ..scores import PER_CENT, held_share, possible
from .building import Task
from .item import Item, ItemScore


def row_of(method: str, task: Task, found: Mapping[int, ItemScore], full: Mapping[int, ItemScore]) -> dict[str, Any]:
    """One method on one task: means in per cent, with 95 % intervals over clusters of items, paired for the difference from
    the uncompressed cache.

    Args:
        found, full: number of an item → its score by this method and by the uncompressed cache.
    """
    row: dict[str, Any] = {
        "method": method,
        "dataset": task.label,
        "query": task.query,
        "metric": task.metric,
        "rate": held_share(list(found.values())),
        "cache_bytes": sum(score.cache_bytes for score in found.values()),
        "full_bytes": sum(score.full_bytes for score in found.values()),
        "items": len(found),
        "clusters": len({task.items[number].cluster for number in found}),
    }
    both = [number for number in found if number in full]
    columns = {"score": {number: 100 * score.score for number, score in found.items()}}
    columns["difference"] = {number: 100 * (found[number].score - full[number].score) for number in both}
    for name in next(iter(found.values())).values:
        columns[name] = {number: score.values[name] for number, score in found.items()}
    for name, values in columns.items():
        value_N = torch.tensor(list(values.values()), dtype=torch.float64)
        cluster_N = torch.tensor([task.items[number].cluster for number in values], dtype=torch.int64)
        row[name] = float(value_N.mean())
        if len(cluster_N.unique()) > 1:
            reach = None if (method, name) == (FULL, "difference") else PER_CENT.get(name)
            bounds = interval(value_N, cluster_N=cluster_N, possible=reach)
            row[f"{name}_low"], row[f"{name}_high"] = (float(each.clamp(*possible(name))) for each in bounds)
    reference = sum(full[number].score for number in both)
    row["of_full"] = 100 * sum(found[number].score for number in both) / reference if reference else None
    return row


def pooled(label: str, tasks: Sequence[Task]) -> Task:
    """Several tasks as one, their items one after another; an interval never draws items of two tasks together."""
    items: list[Item] = []
    for task in tasks:
        first = 1 + max((item.cluster for item in items), default=-1)
        items += [dataclasses.replace(item, cluster=first + item.cluster) for item in task.items]
    inputs = [each for task in tasks for each in task.inputs]
    return dataclasses.replace(tasks[0], label=label, items=items, inputs=inputs, together=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodScores:
    """One method on several tasks, as a row of a table.

    Attributes:
        rows: label of a task, or of a group of tasks → its row.
        rate, score: means over the tasks; groups, whose items are those of their tasks, do not count.
        of_full: mean over the tasks of the per cent of the full cache; None where that scores nothing.
    """

    method: str
    rows: Mapping[str, Mapping[str, Any]]
    rate: float
    score: float
    of_full: float | None


def by_method(rows: Iterable[Mapping[str, Any]]) -> list[MethodScores]:
    """The rows of each method, methods in the order of their first row. Of equal rows the last counts."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["method"], {})[row["dataset"]] = row
    return [_scores_of(method, own) for method, own in found.items()]


def _scores_of(method: str, rows: Mapping[str, Mapping[str, Any]]) -> MethodScores:
    single = [row for row in rows.values() if _is_single(row)]
    shares = [row["of_full"] for row in single if row["of_full"] is not None]
    rate, score = (_mean([row[key] for row in single]) for key in ("rate", "score"))
    return MethodScores(method=method, rows=rows, rate=rate, score=score, of_full=_mean(shares) if shares else None)


def _is_single(row: Mapping[str, Any]) -> bool:
    return "tasks" not in row


def markdown(record: Mapping[str, Any]) -> str:
    """The rows of a run as tables: one of all tasks, then one for each with intervals."""
    rows = record["rows"]
    single = list(dict.fromkeys(row["dataset"] for row in rows if _is_single(row)))
    lines = [
        f"# Tasks on {record['config']['model']}",
        "",
        "Mean scores in per cent; in brackets, the same in per cent of the full cache's.",
        "",
    ]
    lines += [f"| method | bytes | {' | '.join(single)} | mean |", f"|---|{'--:|' * (len(single) + 2)}"]
    methods = by_method(rows)
    for each in methods:
        cells = [_scored(row["score"], row["of_full"]) if (row := each.rows.get(task)) else "–" for task in single]
        mean = _scored(each.score, each.of_full)
        lines.append(f"| {each.method} | {each.rate:.3f} | {' | '.join([*cells, mean])} |")
    for task in dict.fromkeys(row["dataset"] for row in rows):
        of_task = [each.rows[task] for each in methods if task in each.rows]
        lines += ["", f"## {task} ({of_task[0]['metric']}, query-{of_task[0]['query']})", ""]
        lines += ["| method | bytes | score | difference from the full cache | items |", "|---|--:|--:|--:|--:|"]
        for row in of_task:
            score, difference = with_interval(row, "score", ".1f"), with_interval(row, "difference", "+z.1f")
            shown = "–" if row["method"] == FULL else difference
            lines.append(f"| {row['method']} | {row['rate']:.3f} | {score} | {shown} | {row['items']} |")
    return "\n".join(lines) + "\n"


def _scored(score: float, of_full: float | None) -> str:
    return f"{score:.1f}" if of_full is None else f"{score:.1f} ({of_full:.0f})"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
