"""Directories and files that appear whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lowrank_kv.utils.errors import UserError


def check_replaceable(target: str | Path, known_by: str) -> None:
    """Raise :class:`UserError` unless `target` is free, an empty directory, or one that holds a file named `known_by`."""
    target = Path(target)
    if target.is_symlink() or target.exists() and not target.is_dir():
        raise UserError(f"`{target}` is a file or a link, and a directory is to be written there; choose another name")
    if target.is_dir() and any(target.iterdir()) and not (target / known_by).exists():
        raise UserError(
            f"`{target}` holds other things and no `{known_by}`, so that replacing it would lose them; choose another name"
        )


def check_directory(path: str | Path) -> Path:
    """The path, of a directory that is there or can be made. Raises :class:`UserError` for any other."""
    path = Path(path)
    try:
        nearest = next(each for each in (path, *path.absolute().parents) if each.is_symlink() or each.exists())
    except OSError as error:
        raise UserError(f"`{path}` cannot be written: {error.strerror}; choose another name or place") from error
    if not nearest.is_dir():
        raise UserError(f"`{path}` cannot be a directory, since `{nearest}` is a file or a broken link; choose another")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"`{path}` cannot be written, since `{nearest}` is not yours to write in; choose another place")
    return path


@contextlib.contextmanager
def new_directory(target: str | Path, known_by: str) -> Iterator[Path]:
    """Yield an empty directory that takes the name `target` only if the block ends without an exception.

    An existing `target` is moved aside until the new one has its name, and moved back if that fails; it is deleted last.

    Raises:
        UserError: see :func:`check_replaceable`; nothing is written.
    """
    target = Path(target)
    check_replaceable(target, known_by)
    check_directory(target.parent).mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-partial-"))
    _make_readable(partial, 0o777)
    try:
        yield partial
        if target.exists():
            aside = partial.with_name(partial.name.replace("-partial-", "-old-"))
            os.replace(target, aside)
            try:
                os.replace(partial, target)
            except OSError:
                os.replace(aside, target)
                raise
            shutil.rmtree(aside)
        else:
            os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_text(target: str | Path, text: str) -> None:
    """Write a whole text file under its final name in one step."""
    write_bytes(target, text.encode("utf-8"))


def write_bytes(target: str | Path, content: bytes) -> None:
    """Write a whole file under its final name in one step, and only when its content is on the disk."""
    target = Path(target)
    check_directory(target.parent).mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _make_readable(partial, 0o666)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _make_readable(path: Path, mode: int) -> None:
    # tempfile makes what it creates private; a checkpoint is as readable as any other file of the user.
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(mode & ~umask)
