"""Whether records of one page measured the same: equal labels stand for equal texts and tasks there."""

import collections
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lowrank_kv.utils.errors import UserError

from ..methods import FULL
from ..tasks.registry import FAMILIES, READ_BY, default_query
from .points import points_of

_Record = Mapping[str, Any]
_Found = Sequence[tuple[_Record, Any]]  # records, and what something is in each
_OF_MEASUREMENTS, _OF_COMPARISONS = ("model", "dtype", "step"), ("prefix", "length")  # keys of how a model reads
_FILES_OF_TASKS = ("task", "labels", "essay")  # roles of a record's inputs
_HASH = 12  # characters of a hash that are told
# Keys of a task's configuration on which no item depends, or by which its items are told apart; of files the hashes count.
_NOT_OF_ITEMS = ("task", "optional", "items", "together", "length", "query", "file", "labels", "essay")


def check_alike(records: Sequence[_Record]) -> None:
    """Raise :class:`UserError` where records would be compared that measured other models, windows or items, or read them
    otherwise."""
    comparisons = [record for record in records if points_of([record])]
    check_read_alike(records, _OF_MEASUREMENTS)
    check_read_alike(comparisons, _OF_COMPARISONS)
    for role, what in {"model": "the model's configuration", "weights": "the model's weights"}.items():
        inputs = [(record, each) for record in records for each in record["inputs"] if each["role"] == role]
        _check_same(what, [(record, each["sha256"][:_HASH]) for record, each in inputs])
    for file, found in _files_of_tasks(records).items():
        _check_same(f"the file `{file}`", found)
    for text, found in _windows(comparisons).items():
        _check_same(f"the windows of `{text}`", found)
    for task, found in _items(records).items():
        _check_same(f"the items of {task}", found)


def check_read_alike(records: Sequence[_Record], keys: Sequence[str] = (*_OF_MEASUREMENTS, *_OF_COMPARISONS)) -> None:
    """Raise :class:`UserError` where configurations differ in how a model reads; a record may lack a key."""
    for key in keys:
        _check_same(
            f"`{key}`", [(record, config[key]) for record in records if key in (config := record["config"] or {})]
        )


def _check_same(what: str, found: _Found) -> None:
    different = {json.dumps(value, sort_keys=True): (value, record["run_id"]) for record, value in found}
    if len(different) > 1:
        told = ", ".join(f"{value!r} in {run_id}" for value, run_id in different.values())
        raise UserError(
            f"the records differ in {what} ({told}), so they cannot be compared; name only records that have it in common"
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


def _files_of_tasks(records: Sequence[_Record]) -> dict[str, _Found]:
    """Of each file that tasks take their items from the hash of what it holds, or of each of one name."""
    found = collections.defaultdict(list)
    for record in records:
        hashes = collections.defaultdict(list)
        for each in record["inputs"]:
            if each["role"] in _FILES_OF_TASKS:
                hashes[each["name"]].append(each["sha256"][:_HASH])
        for name, those in hashes.items():
            found[name].append((record, sorted(those)))
    return found


def _items(records: Sequence[_Record]) -> dict[str, _Found]:
    """Of each task how many of its items were read, and the settings that they follow from."""
    found = collections.defaultdict(list)
    for record in records:
        for row in record["rows"]:
            if row.get("method") == FULL and "items" in row:
                found[f"`{row['dataset']}`"].append((record, row["items"]))
        for entry in (record["config"] or {}).get("tasks") or []:
            # What is None is as in a record of a version that had no such key.
            given = {key: value for key, value in entry.items() if key not in _NOT_OF_ITEMS and value is not None}
            names = [name for each in entry["task"] for name in FAMILIES.get(each, (each,))]
            for task, length in itertools.product(names, entry.get("length") or [None]):
                settings = {key: value for key, value in given.items() if task in READ_BY.get(key, (task,))}
                of = [f"`{task}`", *([f"{length} tokens"] if length else []), entry.get("query") or default_query(task)]
                found[", ".join(of)].append((record, settings))
    return found
