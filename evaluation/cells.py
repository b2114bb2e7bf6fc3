"""The cells of a comparison on disk, so that a second start measures only the missing ones.

A cell is one method on one window of one text, or on one item of a task. Each is a line of ``cells.jsonl``, appended
when it is measured: what it was measured with, what was found, and the run and commit that did. No line is ever
changed. One that a killed process left half-written is cut off, and measured again.
"""

import collections
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lowrank_kv.utils.atomic_write import append_line
from lowrank_kv.utils.errors import UserError

from .scores import WindowScore

CELLS = "cells.jsonl"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measured cell.

    Attributes:
        score: a dataclass of plain values, :class:`WindowScore` in a comparison by text.
        run_id, commit: of the run that measured it.
    """

    score: Any
    run_id: str
    commit: str | None


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

    def get(self, of: Mapping[str, Any]) -> Cell | None:
        """The cell that was measured with exactly these settings; None if it is missing."""
        return self._found.get(_key(of))

    def add(self, of: Mapping[str, Any], cell: Cell) -> None:
        """Write a cell to the end of the file."""
        line = {"of": dict(of), "score": dataclasses.asdict(cell.score), "run_id": cell.run_id, "commit": cell.commit}
        append_line(self._path, json.dumps(line, ensure_ascii=False, allow_nan=False))
        self._found[_key(of)] = cell

    def _read(self) -> None:
        content = self._path.read_bytes()
        *lines, unfinished = content.split(b"\n")
        if unfinished:  # a process was killed while it wrote
            os.truncate(self._path, len(content) - len(unfinished))
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
                cell = Cell(self._kind(**found["score"]), found["run_id"], found["commit"])
                self._found[_key(found["of"])] = cell
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{self._path}: line {number} is damaged ({error}); delete that line, and its cell is measured again"
                ) from error


def measured_by(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Which run at which commit measured how many of the cells, as a record says it."""
    counts = collections.Counter((cell.run_id, cell.commit) for cell in cells)
    return [{"run_id": run_id, "commit": commit, "cells": count} for (run_id, commit), count in counts.items()]


def _key(of: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True, ensure_ascii=False).encode("utf-8")).hexdigest()
