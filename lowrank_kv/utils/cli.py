"""How every command of the project ends: a user's mistake is one paragraph and status 2, never a traceback."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from lowrank_kv.utils.atomic_write import check_directory
from lowrank_kv.utils.errors import UserError


def output_directory(text: str) -> Path:
    """A parser's type: a directory to be written when the work is done, which must not fail then."""
    try:
        return check_directory(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def output_file(text: str) -> Path:
    """The same of a file."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"`{text}` is a directory, and a file is to be written; name one within it")
    output_directory(str(path.parent))
    return path


def run(main: Callable[[list[str]], None]) -> None:
    """Call ``main(argv)`` and turn a :class:`UserError` into a message on stderr and exit status 2."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
