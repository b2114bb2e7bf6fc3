"""Locks of extensions that torch compiles at first use, for quanto and DeepSpeed: none is waited for without end.

torch marks a folder in which it builds by an empty file `lock`, which it holds open and removes when it is done, and waits
without end and without a word where one is there. A process that is killed while it builds leaves its own for ever. The
package's own kernels need no lock (`lowrank_kv/ops/native/library.py`).
"""

import contextlib
import importlib.util
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from lowrank_kv.utils.errors import UserError

LOCK = "lock"
PATIENCE = 600.0  # seconds that a build which somebody works on is waited for
_ASKED_EVERY = 0.5
_TOLD_AFTER = 10.0
_LOGGER = logging.getLogger("lowrank_kv")


def await_builds(folders: Iterable[Path], patience: float = PATIENCE) -> None:
    """Wait until nobody builds in these folders; the lock of an owner that has died is removed.

    Raises:
        UserError: a build takes longer than `patience` seconds; the message names the lock and its owner.
    """
    for folder in folders:
        _await(folder / LOCK, time.monotonic(), patience)


def quanto_folders() -> list[Path]:
    """Where optimum-quanto builds."""
    found = importlib.util.find_spec("optimum")
    roots = found.submodule_search_locations if found is not None else []
    return [path.parent for root in roots for path in Path(root).glob("quanto/library/extensions/*/build/lock")]


def torch_folders() -> list[Path]:
    """Where torch builds what names no folder of its own, as DeepSpeed's operations."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    roots = [Path(root)] if root else [cache, Path(tempfile.gettempdir()) / "torch_extensions"]
    return [path.parent for each in roots for pattern in ("*/lock", "*/*/lock") for path in each.glob(pattern)]


def _await(lock: Path, began: float, patience: float) -> None:
    is_told, left = False, None
    while (found := _identity(lock)) is not None:
        owners = _owners(lock)
        if owners is None:
            return  # this system does not say who has a file open, and torch waits
        if not owners and found == left:
            _remove_if_nobody_has_it(lock)
            continue
        # torch closes a lock before it removes it: only one that nobody has open for a while was left.
        left = None if owners else found
        waited = time.monotonic() - began
        if owners and waited > patience:
            raise UserError(
                f"process {owners[0]} builds an extension of torch and has held `{lock}` for more than {patience:.0f} s; "
                f"wait for it, or stop it and remove that file"
            )
        if owners and waited > _TOLD_AFTER and not is_told:
            _LOGGER.warning("waiting for process %s, which builds in %s", owners[0], lock.parent)
            is_told = True
        time.sleep(_ASKED_EVERY)


def _identity(lock: Path) -> tuple[int, int, int] | None:
    """Tells a file from a later one of its name; None where there is none."""
    try:
        found = lock.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns  # a number of a removed file may be given out again


def _remove_if_nobody_has_it(lock: Path) -> None:
    # Its owner opened it when it made it, so that a file which nobody has open is of a process that is gone. Since it was
    # looked at, another process may have removed it, and a third may have begun to build. So it is first given another
    # name, which one process can do, and then asked for again.
    aside = lock.with_name(f"{LOCK}.{os.getpid()}.{threading.get_ident()}")
    try:
        lock.rename(aside)
        if _owners(aside) != []:
            aside.rename(lock)
            return
        aside.unlink()
    except FileNotFoundError:
        return  # somebody else has removed it
    except OSError as error:
        raise UserError(
            f"`{lock}` was left by a process that is gone, and cannot be removed ({error.strerror}); remove it, or ask "
            f"its owner to"
        ) from error
    _LOGGER.warning("removed %s, which a process that is gone has left there", lock)


def _owners(path: Path) -> list[int] | None:
    """The processes that have a file open; None where the system does not say."""
    try:
        wanted = path.stat()
    except FileNotFoundError:
        return []  # it has just been let go
    try:
        processes = [int(each) for each in os.listdir("/proc") if each.isdigit()]
    except FileNotFoundError:
        processes = []  # as on macOS
    if not processes:
        return None
    # Another user's process does not show its files: where the file is another's, it may live.
    if wanted.st_uid != os.geteuid() != 0:
        return None
    return [process for process in processes if (wanted.st_dev, wanted.st_ino) in set(_open_files(process))]


def _open_files(process: int) -> Iterator[tuple[int, int]]:
    folder = f"/proc/{process}/fd"
    try:
        handles = os.listdir(folder)
    except OSError:
        return  # it has ended, or is another user's
    for handle in handles:
        with contextlib.suppress(OSError):
            found = os.stat(f"{folder}/{handle}")
            yield found.st_dev, found.st_ino
