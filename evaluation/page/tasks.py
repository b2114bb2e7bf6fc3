"""Scores of tasks: a row for each method, a column for each task."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..methods import FULL
from .points import shown


def task_table(records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Tasks and methods of the rows that score items; None where there are none. Of equal rows the last record's.

    Returns:
        ``tasks`` (label, metric, whether the query is known while the prompt is compressed, items) and ``rows`` (method,
        mean share of bytes, mean per cent of the full cache, and for each task score, per cent of the full cache, and the
        interval of the difference from it, or None).
    """
    found = {
        (row["method"], row["dataset"]): row
        for record in records
        for row in record["rows"]
        if {"method", "dataset", "rate", "score", "items"} <= row.keys()
    }
    if not found:
        return None
    labels = list(dict.fromkeys(task for _, task in found))
    first = {label: next(row for (_, task), row in found.items() if task == label) for label in labels}
    rows = []
    for method in dict.fromkeys(method for method, _ in found):
        own = [found.get((method, label)) for label in labels]
        there = [row for row in own if row is not None]
        shares = [row["of_full"] for row in there if row.get("of_full") is not None]
        rows.append(
            {
                "label": shown(method),
                "rate": sum(row["rate"] for row in there) / len(there),
                "of_full": sum(shares) / len(shares) if shares else None,
                "cells": [None if row is None else _cell(row) for row in own],
            }
        )
    tasks = [
        {"label": label, **{key: row.get(key) for key in ("metric", "query", "items")}} for label, row in first.items()
    ]
    return {"tasks": tasks, "rows": sorted(rows, key=lambda row: (-round(row["rate"], 2), -(row["of_full"] or 0.0)))}


def _cell(row: Mapping[str, Any]) -> dict[str, Any]:
    is_compared = row["method"] != FULL and "difference_low" in row
    return {
        "score": row["score"],
        "of_full": row.get("of_full"),
        "difference": (row["difference_low"], row["difference_high"]) if is_compared else None,
    }
