"""Rows of local JSON lines."""

import dataclasses
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        raise UserError(
            f"`{self.path}`: row {self.number} has no {wanted}, only {', '.join(self.values)}; check that the file is of "
            f"this task"
        )

    def changed(self, name: str, value: Any) -> "Row":
        """The same row with another value."""
        return dataclasses.replace(self, values={**self.values, name: value})


def read_rows(path: str) -> list[Row]:
    """The rows of a .jsonl file, also packed as .gz.

    Raises:
        UserError: the file is missing or empty, or a line of it is not a JSON object.
    """
    try:
        content = Path(path).read_bytes()
        text = (gzip.decompress(content) if path.endswith(".gz") else content).decode("utf-8")
    except (OSError, EOFError) as error:  # an archive that was cut is the latter
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
            raise UserError(f"`{path}`: line {number} is not an object, got {row!r}")
        rows.append(Row(values=row, path=path, number=len(rows) + 1))
    if not rows:
        raise UserError(f"`{path}` has no rows")
    return rows
