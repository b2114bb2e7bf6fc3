"""Scores of tasks: a row for each method, a column for each task."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..methods import FULL
from ..tasks.rows import by_method
from .points import shown

_FIELDS = {"method", "dataset", "rate", "score", "items", "of_full"}


def task_table(records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Tasks and methods of the rows that score items; None where there are none. Of equal rows the last record's.

    Returns:
        ``tasks`` (label, metric, whether the query is known while the prompt is compressed, items) and ``rows`` (method,
        the means of :class:`MethodScores`, and for each task score, per cent of the full cache, and the interval of the
        difference from it, or None).
    """
    found = [row for record in records for row in record["rows"] if row.keys() >= _FIELDS]
    if not found:
        return None
    methods, labels = by_method(found), list(dict.fromkeys(row["dataset"] for row in found))
    first = {label: next(each.rows[label] for each in methods if label in each.rows) for label in labels}
    rows = [
        {
            "label": shown(each.method),
            "rate": each.rate,
            "of_full": each.of_full,
            "cells": [_cell(each.rows[label]) if label in each.rows else None for label in labels],
        }
        for each in methods
    ]
    tasks = [
        {"label": label, **{key: first[label].get(key) for key in ("metric", "query", "items")}} for label in labels
    ]
    return {"tasks": tasks, "rows": sorted(rows, key=lambda row: (-round(row["rate"], 2), -(row["of_full"] or 0.0)))}


def _cell(row: Mapping[str, Any]) -> dict[str, Any]:
    is_compared = row["method"] != FULL and "difference_low" in row
    return {
        "score": row["score"],
        "of_full": row.get("of_full"),
        "difference": (row["difference_low"], row["difference_high"]) if is_compared else None,
    }
