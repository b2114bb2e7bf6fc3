"""How every command of the project ends: a user's mistake is one paragraph and status 2, never a traceback."""

import argparse
import codecs
import io
import os
import select
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lowrank_kv.utils.atomic_write import check_directory
from lowrank_kv.utils.disk_errors import explained
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import path_of

MISTAKE = 2  # status of a command that a user's mistake ended
INTERRUPTED = 130  # of one that Ctrl-C ended, as shells have it
_READER_LEFT = 141  # of one whose output nobody reads any more, as shells have it
_STANDARD_OUTPUT = 1
# Seconds that other processes of a launch keep a mistake to themselves. Most often it is the first one's, too, whose end
# ends them: then it is said once.
_FIRST_SPEAKS = 5.0


def output_directory(text: str) -> Path:
    """A parser's type: a directory to be written when the work is done, which must not fail then."""
    try:
        return check_directory(path_of(text))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def output_file(text: str) -> Path:
    """The same of a file."""
    path = path_of(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"`{text}` is a directory, and a file is to be written; name one within it")
    output_directory(str(path.parent))
    return path


def run(main: Callable[[list[str]], None]) -> None:
    """Call ``main(argv)``; a :class:`UserError`, or what a disk refuses, is a message on stderr and exit status 2. A command
    whose output is cut off, as by ``| head``, ends without a word."""
    _open_streams()
    threading.excepthook = _without_disk_errors(threading.excepthook)
    warnings.formatwarning = _one_paragraph
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STANDARD_OUTPUT)  # where the interpreter's last flush may go
        _end(None, _READER_LEFT)
    except UserError as error:
        if not _is_first():
            time.sleep(_FIRST_SPEAKS)
        _end(f"error: {error}", MISTAKE)
    except OSError as error:
        mended = explained(error, error.filename or "a file", what="read or written")
        if mended is None:
            raise
        _end(f"error: {mended}", MISTAKE)
    except KeyboardInterrupt:
        # Every process of a launch is interrupted, and one line says so.
        _end("interrupted" if _is_first() else None, INTERRUPTED)


def _open_streams() -> None:
    """Let standard output and errors be written to where they are closed, or lack letters of what is said."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the rest of the process
        elif isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="replace" if name == "stdout" else "backslashreplace")


def _reader_has_left() -> bool:
    """Whether nobody reads standard output any more, as behind ``| head -1``. Other pipes lead to processes of our own."""
    asked = select.poll()
    asked.register(_STANDARD_OUTPUT, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in asked.poll(0))


def _one_paragraph(message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning as a command shows it: without the line of code that gave it."""
    return f"warning: {message}\n"


def _is_first() -> bool:
    """Whether this is the first process of a launch, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def _end(message: str | None, status: int) -> NoReturn:
    close_bars()
    if message is not None:
        print(message, file=sys.stderr)
    sys.exit(status)


def close_bars() -> None:
    """End the lines of all progress bars, so that what is printed next begins a line of its own."""
    tqdm = sys.modules.get("tqdm")  # whoever shows a bar has imported it
    for bar in list(getattr(tqdm.tqdm, "_instances", ())) if tqdm is not None else ():
        bar.close()


def _without_disk_errors(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """A hook of threads that is silent about what the main thread is told of, too: TensorBoard writes from a thread."""

    def quiet(arguments: Any) -> None:
        if explained(arguments.exc_value, "") is None:
            hook(arguments)

    return quiet
