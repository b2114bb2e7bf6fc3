"""Progress bars: with a unit and a name, lively on a terminal, a line now and then in a file."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_ON_TERMINAL, _IN_FILE = 0.1, 30.0  # seconds between two states of a bar


def progress_bar(iterable: Iterable | None = None, *, unit: str, desc: str, **settings: Any) -> tqdm:
    """A bar on standard error.

    Args:
        iterable: what to go through; None where the caller counts (`total` and `update`).
        unit: of what is counted.
        desc: what is going on.
        settings: of tqdm, such as ``total`` or ``disable``.
    """
    interval = _ON_TERMINAL if sys.stderr.isatty() else _IN_FILE
    settings = {"mininterval": interval, "maxinterval": max(interval, 10.0), "dynamic_ncols": True, **settings}
    return tqdm(iterable, unit=unit, desc=desc, **settings)
