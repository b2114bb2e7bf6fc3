"""The cells of a comparison on disk, so that a second start measures only the missing ones.

A cell is one method on one window of one text, or on one item of a task. Each is a line of ``cells.jsonl``, appended
when it is measured: what it was measured with, what was found, and which run did, at which code, on what. No line is ever
changed. One that a killed process left half-written is cut off, and measured again.
"""

import collections
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lowrank_kv.utils.atomic_write import append_line
from lowrank_kv.utils.errors import UserError

from .scores import WindowScore

CELLS = "cells.jsonl"


@dataclasses.dataclass(frozen=True)
class Measurer:
    """Which run measured something, at which code, and on what.

    Attributes:
        run_id: of the run.
        commit, dirty: of the checkout; None where there was none, or where an earlier version did not say.
        version: of the installed package where there was no checkout, else None.
        torch: its version.
        processor: the GPU's name where one computed, else the CPU's and its vector instructions.
    """

    run_id: str
    commit: str | None
    dirty: bool | None = None
    torch: str | None = None
    processor: str | None = None
    version: str | None = None

    @classmethod
    def of_run(cls, record: Mapping[str, Any]) -> "Measurer":
        """The run whose record this is, now."""
        code, environment = record["code"], record["environment"]
        return cls(
            run_id=record["run_id"],
            commit=code["commit"],
            dirty=code["dirty"],
            torch=environment["torch"],
            # Of one name some multiply in bf16, and others cannot (:mod:`evaluation.wide_products`).
            processor=environment["gpu"] or f"{environment['cpu']}, {environment['vector']}",
            version=code["version"] if code["commit"] is None else None,
        )


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measured cell.

    Attributes:
        score: a dataclass of plain values, :class:`WindowScore` in a comparison by text.
        by: the run that measured it.
    """

    score: Any
    by: Measurer


class Cells:
    """All that was measured in one directory."""

    def __init__(self, directory: Path, kind: type = WindowScore):
        """
        Args:
            kind: the class of the scores.
        """
        self._kind = kind
        self._path = directory / CELLS
        self._found: dict[str, Cell] = {}
        if self._path.exists():
            self._read()

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._found.values())

    def get(self, of: Mapping[str, Any]) -> Cell | None:
        """The cell that was measured with exactly these settings; None if it is missing."""
        return self._found.get(_key(of))

    def add(self, of: Mapping[str, Any], cell: Cell, what: str) -> None:
        """Write a cell to the end of the file.

        Args:
            what: is measured, for errors.

        Raises:
            UserError: a figure is no finite number; nothing is written.
        """
        _check_finite(cell.score, what)
        line = {"of": dict(of), "score": dataclasses.asdict(cell.score), **dataclasses.asdict(cell.by)}
        append_line(self._path, json.dumps(line, ensure_ascii=False, allow_nan=False))
        self._found[_key(of)] = cell

    def _read(self) -> None:
        content = self._path.read_bytes()
        *lines, unfinished = content.split(b"\n")
        if unfinished:  # a process was killed while it wrote
            os.truncate(self._path, len(content) - len(unfinished))
        own = {field.name for field in dataclasses.fields(self._kind)}
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
                of, score = found.pop("of"), found.pop("score")
                others = score.keys() - own
                if not others:
                    self._found[_key(of)] = Cell(self._kind(**score), Measurer(**found))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{self._path}: line {number} is damaged ({error}); delete that line, and its cell is measured again"
                ) from error
            if others:
                raise UserError(
                    f"{self._path} holds what another command measured: line {number} says {', '.join(sorted(others))}; "
                    f"choose another --output"
                )


def _check_finite(score: Any, what: str) -> None:
    fields = dataclasses.asdict(score)
    figures = fields | fields.get("values", {})
    wrong = [name for name, value in figures.items() if isinstance(value, float) and not math.isfinite(value)]
    if wrong:
        whose = "the uncompressed model's own figures" if "full_loss" in wrong else "figures"
        raise UserError(
            f"{what}: {whose} are not finite ({', '.join(wrong)}), so that nothing can be said of it; measure in another "
            f"`dtype`, or leave it out"
        )


def measured_by(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Which runs measured how many of the cells, as a record says it."""
    counts = collections.Counter(cell.by for cell in cells)
    return [{**dataclasses.asdict(by), "cells": count} for by, count in counts.items()]


def _key(of: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True, ensure_ascii=False).encode("utf-8")).hexdigest()
