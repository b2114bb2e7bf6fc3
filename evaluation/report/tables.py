"""Published tables as Markdown.

A table has `columns` and `rows`; what a cell shows is the table's own selection, with its column's and its row's parts put
over it (`published.py`). A column has a `title`, `label: true` where it shows the rows' labels, and `left: true` where it
shows words. A row has a `label` for each column of labels (a list where there are several), `cells` for what differs in one
column (by the column's `key`, or its title), and `bold` for the columns (`true` for all cells) that stand out. `–` as a cell
is a measurement that was not made. `list: true` shows each row as an item, for cells of many words: the first two cells, and
below them the parts of the last, which `; ` divides.

In titles and labels `{id}` is a published number; no other decimal number may stand there.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .documents import stray_decimals
from .published import NOT_MEASURED, PUBLISHED, SELECTION, Published, ReportError, merged

_NUMBER = re.compile(r"\{([\w.-]+)\}")
_TABLE, _COLUMN = {"columns", "rows", "list", *SELECTION}, {"title", "key", "label", "left", *SELECTION}
_ROW = {"label", "cells", "bold", *SELECTION}

RUNS_A_LINE = 3  # links below a table


def table(published: Published, identifier: str, use: Callable[[str], None]) -> list[str]:
    """The lines of a table. `use` is told the ids of the numbers in its titles and labels."""
    place = f"tables.{identifier}"
    spec = published.tables[identifier]
    _check_keys(spec, _TABLE, place)
    common = {key: value for key, value in spec.items() if key in SELECTION}
    columns = spec.get("columns", [])
    for column in columns:
        _check_keys(column, _COLUMN, f"{place}, column {column.get('title')!r}")

    def literal(text: Any, where: str) -> str:
        return words(published, str(text), where, use)

    is_list, titles = spec.get("list", False), [literal(each["title"], f"{place}, a title") for each in columns]
    rule = "|".join("---" if each.get("label") or each.get("left") else "--:" for each in columns)
    lines = [] if is_list else [_line(titles), f"|{rule}|"]
    for row in spec.get("rows", []):
        here = f"{place}, row {row.get('label')!r}"
        _check_keys(row, _ROW, here)
        labels = row.get("label", [])
        labels = iter(labels if isinstance(labels, list) else [labels])
        known = {_key(column) for column in columns}
        for part in ("cells", "bold"):
            named = row.get(part, ())
            unknown = set() if named is True else set(named) - known
            if unknown:
                raise ReportError(f"{PUBLISHED}: {here}: `{part}` names no column {sorted(map(str, unknown))[0]!r}")
        cells = []
        for column in columns:
            where = f"{here}, column {_key(column)!r}"
            label = column.get("label")
            text = literal(next(labels, ""), where) if label else _cell(published, common, column, row, where)
            bold = not label if row.get("bold") is True else _key(column) in row.get("bold", ())
            cells.append(f"**{text}**" if bold and text != NOT_MEASURED else text)
        lines += _item(*cells) if is_list else [_line(cells)]
    return lines


def number(published: Published, identifier: str) -> str:
    """A published number as text."""
    return published.text(published.numbers[identifier], f"numbers.{identifier}")


def sources(published: Published, document: Path) -> str:
    """A line that links the runs read since `published.touched` was cleared."""
    links = []
    for short in published.touched:
        path = published.path_of(short)
        links.append(f"[{path.stem[-6:]}]({relative(path, document.parent)})")
    lines = [", ".join(links[start : start + RUNS_A_LINE]) for start in range(0, len(links), RUNS_A_LINE)]
    return "<sub>Runs: " + ",\n".join(lines) + "</sub>"


def words(published: Published, text: str, where: str, use: Callable[[str], None]) -> str:
    """A title or label with its numbers put in."""
    if strays := stray_decimals(_NUMBER.sub("", text)):
        raise ReportError(
            f"{PUBLISHED}: {where} holds {strays[0][1]}, which nothing proves; publish it and write its id in {{}}"
        )

    def shown(match: re.Match) -> str:
        if match.group(1) not in published.numbers:
            raise ReportError(f"{PUBLISHED}: {where} uses the number `{match.group(1)}`, which is not published")
        use(match.group(1))
        return number(published, match.group(1))

    return _NUMBER.sub(shown, text)


def _cell(published: Published, common: Mapping, column: Mapping, row: Mapping, where: str) -> str:
    own = row.get("cells", {}).get(_key(column), {})
    if isinstance(own, str):
        if own != NOT_MEASURED:
            raise ReportError(f"{PUBLISHED}: {where} is the text {own!r}; give a selection, or {NOT_MEASURED}")
        return own
    chosen = common
    for part in (column, row, own):
        chosen = merged(chosen, {key: value for key, value in part.items() if key in SELECTION})
    return published.text(chosen, where)


def _key(column: Mapping[str, Any]) -> str:
    return str(column.get("key", column.get("title")))


def _line(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def _item(first: str, second: str, reasons: str) -> list[str]:
    return [f"- **{first}**: {second}", *(f"    - {reason}" for reason in reasons.split("; "))]


def _check_keys(value: Any, known: set[str], where: str) -> None:
    if not isinstance(value, Mapping):
        raise ReportError(f"{PUBLISHED}: {where} must be a mapping, got {value!r}")
    if unknown := sorted(set(value) - known):
        raise ReportError(f"{PUBLISHED}: {where} has the unknown key {unknown[0]!r}; use {', '.join(sorted(known))}")


def relative(path: Path, directory: Path) -> str:
    return Path(os.path.relpath(path, directory)).as_posix()
