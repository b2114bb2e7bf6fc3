"""Rows of local JSON lines."""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What a row holds, and where it stands: the path of its file, and its number from one on."""

    values: Mapping[str, Any]
    path: str
    number: int

    def get(self, *names: str) -> Any:
        """The value of the first of these keys that it has.

        Raises:
            UserError: it has none of them.
        """
        for name in names:
            if name in self.values:
                return self.values[name]
        wanted = " or ".join(f"`{name}`" for name in names)
        raise self.error(f"has no {wanted}, only {', '.join(self.values)}")

    def text(self, *names: str) -> str:
        """The same of a text."""
        return self._checked(self.get(*names), str, names, "a text")

    def texts(self, *names: str) -> list[str]:
        """The same of a list of texts."""
        values = self._checked(self.get(*names), list, names, "a list of texts")
        for value in values:
            self._checked(value, str, names, "a list of texts")
        return values

    def mappings(self, *names: str) -> list[Mapping[str, Any]]:
        """The same of a list of objects."""
        values = self._checked(self.get(*names), list, names, "a list of objects")
        for value in values:
            self._checked(value, Mapping, names, "a list of objects")
        return values

    def within(self, name: str) -> "Row":
        """The object that a key holds, as a row that stands in the same place."""
        return dataclasses.replace(self, values=self._checked(self.get(name), Mapping, (name,), "an object"))

    def _checked(self, value: Any, kind: type, names: tuple[str, ...], what: str) -> Any:
        if not isinstance(value, kind):
            raise self.error(f"has {value!r} as {' or '.join(f'`{name}`' for name in names)}, which must be {what}")
        return value

    def error(self, what: str) -> UserError:
        """What is wrong with the row, in words."""
        return UserError(f"`{self.path}`: row {self.number} {what}; check that the file is of this task")

    def changed(self, name: str, value: Any) -> "Row":
        """The same row with another value."""
        return dataclasses.replace(self, values={**self.values, name: value})


def first_rows(path: str, count: int | None) -> list[Row]:
    """The first rows of a file, or all of them where `count` is None.

    Raises:
        UserError: as :func:`read_rows`, or it has fewer.
    """
    rows = read_rows(path)
    require(count is None or count <= len(rows), "items", count, f"at most {len(rows)}, the rows of `{path}`")
    return rows[:count]


def read_rows(path: str) -> list[Row]:
    """The rows of a .jsonl file, also packed as .gz.

    Raises:
        UserError: the file is missing or empty, or a line of it is not a JSON object.
    """
    try:
        content = Path(path).read_bytes()
        text = (gzip.decompress(content) if path.endswith(".gz") else content).decode("utf-8")
    except (OSError, EOFError, zlib.error) as error:  # of an archive: it was cut, or damaged
        raise UserError(f"cannot read `{path}`: {getattr(error, 'strerror', None) or error}; check `file`") from error
    except UnicodeDecodeError as error:
        raise UserError(f"`{path}` is not UTF-8 text: {error.reason}; convert it") from error
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"`{path}`: line {number} is not JSON ({error}); a line must hold one object") from error
        if not isinstance(row, dict):
            raise UserError(f"`{path}`: line {number} must hold one object; got {type(row).__name__}; check `file`")
        rows.append(Row(values=row, path=path, number=len(rows) + 1))
    if not rows:
        raise UserError(f"`{path}` has no rows; check `file`")
    return rows
