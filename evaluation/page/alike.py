"""Whether records of one page measured the same: equal labels stand for equal texts and tasks there."""

import collections
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lowrank_kv.utils.errors import UserError

from ..methods import FULL
from .points import points_of

_Record = Mapping[str, Any]
_Found = Sequence[tuple[_Record, Any]]  # records, and what something is in each
_HASH = 12  # characters of a hash that are told
_NOT_OF_ITEMS = ("task", "optional", "items")  # keys of a task's configuration that no item depends on


def check_alike(records: Sequence[_Record]) -> None:
    """Raise :class:`UserError` where records would be compared that measured other models, windows or items, or read them
    otherwise."""
    comparisons = [record for record in records if points_of([record])]
    of_key = {"model": records, "dtype": records, "step": records, "prefix": comparisons, "length": comparisons}
    for key, those in of_key.items():
        _check_same(
            f"`{key}`", [(record, config[key]) for record in those if key in (config := record["config"] or {})]
        )
    for role, what in {"model": "the model's configuration", "weights": "the model's weights"}.items():
        inputs = [(record, each) for record in records for each in record["inputs"] if each["role"] == role]
        _check_same(what, [(record, each["sha256"][:_HASH]) for record, each in inputs])
    for text, found in _windows(comparisons).items():
        _check_same(f"the windows of `{text}`", found)
    for task, found in _items(records).items():
        _check_same(f"the items of `{task}`", found)


def _check_same(what: str, found: _Found) -> None:
    different = {json.dumps(value, sort_keys=True): (value, record["run_id"]) for record, value in found}
    if len(different) > 1:
        told = ", ".join(f"{value!r} in {run_id}" for value, run_id in different.values())
        raise UserError(
            f"the records differ in {what} ({told}), so that one page cannot compare them; make a page for each"
        )


def _windows(records: Sequence[_Record]) -> dict[str, _Found]:
    """Of each text the hash of its windows' tokens, and how many windows were read."""
    found = collections.defaultdict(list)
    for record in records:
        hashes = {each["name"]: each["sha256"][:_HASH] for each in record["inputs"] if each["role"] == "text"}
        for text, sha256 in hashes.items():
            counts = {row["windows"] for row in record["rows"] if row.get("dataset") == text and "windows" in row}
            if counts:
                found[text].append((record, [sha256, *sorted(counts)]))
    return found


def _items(records: Sequence[_Record]) -> dict[str, _Found]:
    """Of each task how many of its items were read, and the settings that they follow from."""
    found = collections.defaultdict(list)
    for record in records:
        for row in record["rows"]:
            if row.get("method") == FULL and "items" in row:
                found[row["dataset"]].append((record, row["items"]))
        for entry in (record["config"] or {}).get("tasks") or []:
            settings = {key: value for key, value in entry.items() if key not in _NOT_OF_ITEMS}
            for task in entry["task"]:
                found[f"{task}, {settings.get('length')} tokens"].append((record, settings))
    return found
