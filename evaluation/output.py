"""What the commands that measure do alike: they have an output directory, and write a record there while they measure."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lowrank_kv.utils import cli, run_record
from lowrank_kv.utils.run_lock import run_lock


def output_argument(what: str) -> dict[str, Any]:
    """The argument `--output` for :func:`lowrank_kv.utils.config.parse_config`; `what` says what it is the directory of."""
    return {"flag": "--output", "type": cli.output_directory, "metavar": "DIR", "required": True, "help": what}


def written(records: Iterable[dict[str, Any]], output: Path) -> tuple[dict[str, Any], Path]:
    """Write each state of a run's record when it comes, in place of the one before; the last one and its file."""
    with run_lock(output):
        for record in records:
            path = run_record.write(record, output)
    return record, path
