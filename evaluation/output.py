"""What the commands that measure do alike: they have an output directory, and write a record there while they measure."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lowrank_kv.utils import cli, run_record
from lowrank_kv.utils.run_lock import run_lock

_WRITE_EVERY = 60.0  # seconds between two writings of a record that grows

MakeRecord = Callable[[], dict[str, Any]]
"""Makes the record of what is measured when it is called: rows with intervals take a while."""


def output_argument(what: str) -> dict[str, Any]:
    """The argument `--output` for :func:`lowrank_kv.utils.config.parse_config`; `what` says what it is the directory of."""
    return {"flag": "--output", "type": cli.output_directory, "metavar": "DIR", "required": True, "help": what}


def write_while_measuring(progress: Iterable[MakeRecord], output: Path) -> tuple[dict[str, Any], Path]:
    """Measure, and write the record after the first step, once a minute and at the end, in place of the one before; the
    last one and its file."""
    last = -float("inf")
    with run_lock(output):
        for make_record in progress:
            if time.monotonic() - last > _WRITE_EVERY:
                run_record.write(make_record(), output)
                last = time.monotonic()
        record = make_record()
        return record, run_record.write(record, output)
