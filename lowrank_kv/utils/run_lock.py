"""One run at a time writes into an output directory; a second is told who the first is.

A run holds a lock of the system on a file, which ends with its process however that ends. The file names its owner: host,
process and start. Where a file system does not share such locks between hosts, or has none, the owner's sign of life does:
it renews the file's time every few seconds, and counts as dead when that has stopped.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowrank_kv.utils.atomic_write import check_directory
from lowrank_kv.utils.disk_errors import making, writing
from lowrank_kv.utils.errors import UserError

LOCK = ".run.lock"
RENEWED_EVERY, DEAD_AFTER = 15.0, 90.0  # seconds
_NOT_SUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def run_lock(output: str | Path) -> Iterator[None]:
    """Keep other runs out of a directory while the block runs; it is made if it is missing.

    The lock of an owner that has died is taken over.

    Raises:
        UserError: another run writes there, which is named, or the disk refuses.
    """
    path = check_directory(output) / LOCK
    with writing(output):
        is_new = not path.parent.exists()
        with making(output):
            path.parent.mkdir(parents=True, exist_ok=True)
        handle = _locked(path)
    try:
        with writing(output):
            os.ftruncate(handle, 0)
            os.pwrite(handle, (json.dumps(_owner()) + "\n").encode("utf-8"), 0)
        with _signs_of_life(handle):
            yield
    finally:
        # First the name, then the lock: who opens the file in between sees that it has lost its name.
        path.unlink(missing_ok=True)
        os.close(handle)
        if is_new:
            with contextlib.suppress(OSError):  # a run that wrote nothing leaves nothing
                path.parent.rmdir()


def _locked(path: Path) -> int:
    """A handle of the lock's file that this process has locked. Raises :class:`UserError` where another run has."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            is_mine = _lock(handle)
            owner = _read(handle)
            if is_mine is False or _gives_signs_of_life(owner, handle, are_here=is_mine is None):
                raise UserError(
                    f"`output` is {path.parent}, into which another run writes: {_described(owner)}; wait for it, stop it, "
                    f"or choose another `output`"
                )
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(handle).st_ino == path.stat().st_ino:
                    return handle
        except BaseException:  # Ctrl-C, too: an open handle would hold the lock as long as the process lives
            os.close(handle)
            raise
        os.close(handle)  # its owner has just ended, and taken the name away


def _lock(handle: int) -> bool | None:
    """Whether the system's lock could be had; None where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        return None
    return True


def _owner() -> dict[str, Any]:
    started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "start": started}


def _read(handle: int) -> dict[str, Any]:
    """What the file says of its owner; nothing where that was never written, or is damaged."""
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _gives_signs_of_life(owner: dict[str, Any], handle: int, *, are_here: bool) -> bool:
    """Whether an owner gave one lately.

    Args:
        are_here: whether one on this host may be asked, too: else the system's lock says whether it lives.
    """
    if "host" not in owner:
        return False
    if owner["host"] == socket.gethostname() and not (are_here and _is_running(owner.get("pid"))):
        return False
    return time.time() - os.fstat(handle).st_mtime < DEAD_AFTER


def _is_running(process: Any) -> bool:
    """Whether there is such a process on this host."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError, TypeError):  # the file may say anything
        return False
    except PermissionError:
        pass  # it is somebody else's
    return True


def _described(owner: dict[str, Any]) -> str:
    known = ("host", "host"), ("process", "pid"), ("started", "start")
    return ", ".join(f"{what} {owner[key]}" for what, key in known if key in owner) or "it has just begun"


@contextlib.contextmanager
def _signs_of_life(handle: int) -> Iterator[None]:
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEWED_EVERY):
            with contextlib.suppress(OSError):  # a disk that is gone for a while is the run's own affair
                os.utime(handle)

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
