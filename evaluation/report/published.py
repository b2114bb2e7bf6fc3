"""What is published: `results/published.yaml`, and the values it picks from the runs.

A *selection* picks values: of the run `run` (or of several, `runs`) either the `field` of the rows that agree with
`where`, or the `path` of a value elsewhere in the record (`summary.heldout.*.hard_rate`, or a list of keys where one holds
a dot; `*` stands for every key). It is shown by the format specification `format`. Exactly one value must be found, unless
`show` says how several are shown. `each` lists selections that replace parts of this one; they are shown one after the
other, `join` between them, or in the places `{}` of it. `–` in their place is a measurement that was not made.
"""

import collections
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lowrank_kv.utils import run_record
from lowrank_kv.utils.errors import UserError

from ..scores import rows_of

PUBLISHED = "published.yaml"
SELECTION = {"run", "runs", "where", "field", "path", "format", "scale", "show", "each", "join"}
NOT_MEASURED = "–"
SHOWN = ("range", "mean", "min", "max", "ratio", "count")
_PARTS = ("runs", "numbers", "tables", "figures")


class ReportError(UserError):
    """A published value that cannot be made; says where it stands, what is wrong and what to do."""


class Published:
    """`published.yaml` and the runs it names.

    Attributes:
        numbers, tables, figures: what is published, by id.
        touched: short names of the runs read since it was last cleared.

    Raises:
        ReportError: the file is missing or malformed, or names a run that is not there.
    """

    def __init__(self, results: Path):
        self.results = results
        values = _read(results / PUBLISHED)
        self.names: dict[str, str] = values["runs"]
        self.numbers, self.tables, self.figures = values["numbers"], values["tables"], values["figures"]
        self.touched: dict[str, None] = {}
        self._records: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, list[dict[str, Any]]] = {}
        counts = collections.Counter([*self.numbers, *self.tables, *self.figures])
        twice = [identifier for identifier, count in counts.items() if count > 1]
        if twice:
            raise ReportError(f"{PUBLISHED}: `{twice[0]}` is published twice; give each an id of its own")
        for short in self.names:
            self.record(short, f"runs.{short}")
        self.touched.clear()

    @property
    def ids(self) -> set[str]:
        return {*self.numbers, *self.tables, *self.figures}

    def path_of(self, short: str) -> Path:
        """The file of a run, by its short name in `runs`."""
        identifier = self.names[short]
        found = [path for kind in run_record.KINDS if (path := self.results / kind / f"{identifier}.json").exists()]
        if len(found) != 1:
            raise ReportError(
                f"{PUBLISHED}: runs.{short} names {identifier}, of which there is no file; name one there is"
            )
        return found[0]

    def record(self, short: str, where: str) -> dict[str, Any]:
        """The record of a run, by its short name. `where` is what errors call the place that asks."""
        if short not in self.names:
            raise ReportError(f"{PUBLISHED}: {where} names the run {short!r}, which `runs` does not list; add it there")
        self.touched[short] = None
        if short not in self._records:
            try:
                self._records[short] = run_record.load(self.path_of(short))
            except run_record.RecordError as error:
                raise ReportError(f"{self.results.name}/{error}") from error
        return self._records[short]

    def rows(self, short: str, wanted: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        """The rows of a run that agree with `wanted`; a number with decimals agrees within half a thousandth, a
        list when one of its values does."""
        record = self.record(short, where)
        if short not in self._rows:  # a table asks for every cell, and the intervals of all rows are resampled anew
            self._rows[short] = rows_of(record)
        return [row for row in self._rows[short] if all(_agrees(row, *each) for each in wanted.items())]

    def text(self, selection: Mapping[str, Any], where: str) -> str:
        """What a selection is shown as."""
        unknown = sorted(set(selection) - SELECTION)
        if unknown:
            raise ReportError(
                f"{PUBLISHED}: {where} has the unknown key {unknown[0]!r}; use {', '.join(sorted(SELECTION))}"
            )
        if "each" in selection:
            common = {key: value for key, value in selection.items() if key not in ("each", "join")}
            parts = [
                part if part == NOT_MEASURED else self.text(merged(common, part), where) for part in selection["each"]
            ]
            join = selection.get("join", " / ")
            return join.format(*parts) if "{}" in join else join.join(parts)
        values = self._values(selection, where)
        show, specification = selection.get("show"), selection.get("format", "")
        if show is not None and show not in SHOWN:
            raise ReportError(f"{PUBLISHED}: {where}: `show` must be one of {', '.join(SHOWN)}, got {show!r}")
        if not values or show is None and len(values) != 1:
            raise ReportError(
                f"{PUBLISHED}: {where} finds {len(values)} values instead of one ({_described(selection)}); correct "
                "`where`, or say by `show` how several are shown"
            )
        try:
            shown = _shown(values, show)
            texts = [format(each * selection.get("scale", 1), specification) for each in shown]
        except (TypeError, ValueError) as error:
            raise ReportError(
                f"{PUBLISHED}: {where} cannot show {values[0]!r} as {specification!r} ({error})"
            ) from error
        return " to ".join(dict.fromkeys(texts))

    def _values(self, selection: Mapping[str, Any], where: str) -> list[Any]:
        shorts = selection.get("runs") or [selection.get("run")]
        found = []
        for short in shorts:
            if "path" in selection:
                path = selection["path"]
                found += _at(self.record(short, where), path if isinstance(path, list) else str(path).split("."))
                continue
            field = selection.get("field")
            for row in self.rows(short, selection.get("where", {}), where):
                if field not in row:
                    raise ReportError(f"{PUBLISHED}: {where} asks for `{field}`, and rows have {', '.join(row)}")
                found.append(row[field])
        return found


def merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A selection with parts replaced: `where` is joined; `run` and `runs` exclude each other, as do `field` and `path`."""
    values = dict(common)
    for one, other in (("run", "runs"), ("runs", "run"), ("field", "path"), ("path", "field")):
        if one in own:
            values.pop(other, None)
    where = {**common.get("where", {}), **own.get("where", {})}
    return values | own | ({"where": where} if where else {})


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        raise ReportError(f"there is no {path.name} beside the results; it says what the documents publish")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ReportError(f"{path.name} is not YAML: {error}") from error
    if not isinstance(values, dict) or set(values) - set(_PARTS):
        raise ReportError(f"{path.name} must be a mapping with {', '.join(_PARTS)}")
    values = {part: values.get(part) or {} for part in _PARTS}
    for part, value in values.items():
        if not isinstance(value, dict):
            raise ReportError(f"{path.name}: `{part}` must be a mapping")
    return values


def _agrees(row: Mapping[str, Any], key: str, wanted: Any) -> bool:
    found = row.get(key)
    if isinstance(wanted, list):
        return any(_agrees(row, key, each) for each in wanted)
    if isinstance(wanted, float) and isinstance(found, int | float):
        return abs(found - wanted) < 5e-4
    return found == wanted


def _at(value: Any, path: list[str]) -> list[Any]:
    """All values at a path of keys, of which `*` is any."""
    if not path:
        return [value]
    if not isinstance(value, Mapping):
        return []
    keys = list(value) if path[0] == "*" else [path[0]] if path[0] in value else []
    return [found for key in keys for found in _at(value[key], path[1:])]


def _shown(values: list[Any], show: str | None) -> list[Any]:
    if show == "range":
        return [min(values), max(values)]
    if show == "ratio":
        first, second = values
        return [first / second]
    by_name = {"mean": statistics.fmean, "min": min, "max": max, "count": len, None: lambda found: found[0]}
    return [by_name[show](values)]


def _described(selection: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in selection.items() if key in ("run", "runs", "where", "path"))
