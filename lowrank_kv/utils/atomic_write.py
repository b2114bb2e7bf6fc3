"""Directories and files that appear whole or not at all, and only when their content is on the disk."""

import contextlib
import ctypes
import glob
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from lowrank_kv.utils.disk_errors import making, writing
from lowrank_kv.utils.errors import UserError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


def check_replaceable(target: str | Path, known_by: str) -> None:
    """Raise :class:`UserError` unless `target` is free, or a directory that can be replaced: it is empty, or holds a file
    named `known_by` and no directory."""
    target = Path(target)
    if target.is_symlink() or target.exists() and not target.is_dir():
        raise UserError(f"`{target}` is a file or a link, and a directory is to be written there; choose another name")
    if not target.is_dir():
        return
    if os.path.ismount(target) or target.samefile(Path.cwd()):
        what = "a mount point" if os.path.ismount(target) else "the working directory"
        raise UserError(f"`{target}` is {what}, which cannot be replaced; name a directory within it")
    if any(target.iterdir()) and not (target / known_by).exists():
        raise UserError(
            f"`{target}` holds other things and no `{known_by}`, so that replacing it would lose them; choose another name"
        )
    within = [path.name for path in target.iterdir() if path.is_dir()]
    if within:
        raise UserError(
            f"`{target}` holds directories ({', '.join(sorted(within))}), which replacing it would lose; choose another name"
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

    The new one and an existing `target` exchange names in one step where the file system can, so that there is one of them
    under that name at any time; the old one is deleted last. Elsewhere the old one is moved aside first, and a process that
    is killed between the two steps leaves it for :func:`put_back`.

    Raises:
        UserError: see :func:`check_replaceable`, or the disk refuses; an earlier `target` is as it was.
    """
    target = Path(target)
    check_replaceable(target, known_by)
    with writing(target):
        with making(target):
            check_directory(target.parent).mkdir(parents=True, exist_ok=True)
            put_back(target)
            partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-partial-"))
        try:
            _make_readable(partial, 0o777)
            yield partial
            for path in partial.rglob("*"):
                if path.is_file() and not path.is_symlink():
                    _make_readable(path, 0o666)
            _write_through(partial)
            if not target.exists():
                os.replace(partial, target)
            elif not _exchange(partial, target):
                _replace_in_two_steps(partial, target)
            _write_through_names(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def put_back(target: str | Path) -> None:
    """Give a directory its name again, where a process was killed between moving it aside and naming its successor."""
    target = Path(target)
    if target.exists() or not os.access(target.parent, os.W_OK):
        return
    try:
        aside = sorted(target.parent.glob(f".{glob.escape(target.name)}-old-*"), key=os.path.getmtime)
        if aside:
            os.replace(aside[-1], target)
    except OSError:
        if not target.exists():  # else its successor has come meanwhile, or another process has put it back
            raise


def _replace_in_two_steps(partial: Path, target: Path) -> None:
    aside = partial.with_name(partial.name.replace("-partial-", "-old-"))
    is_replaced = False
    while not is_replaced:
        os.replace(target, aside)
        try:
            os.replace(partial, target)
            is_replaced = True
        except OSError:
            # Not there: a process that read it between the two steps took this one for dead and put it back.
            if aside.exists():
                put_back(target)
                raise
    shutil.rmtree(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Let two directories exchange their names in one step; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    return renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def copy_all_but(names: Collection[str], directory: Path, target: Path) -> None:
    """Copy what lies in a directory, such as a card beside a checkpoint, into another one, but for these names."""
    for path in directory.iterdir():
        if path.name not in names:
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, target / path.name)


def write_text(target: str | Path, text: str) -> None:
    """Write a whole text file under its final name in one step."""
    write_bytes(target, text.encode("utf-8"))


def write_bytes(target: str | Path, content: bytes) -> None:
    """Write a whole file under its final name in one step, and only when its content is on the disk. Where that name is a
    link, the file that it leads to is replaced.

    Raises:
        UserError: something else than a file has this name, or the disk refuses; an earlier file is as it was.
    """
    target = Path(target)
    if target.is_dir():
        raise UserError(f"`{target}` is a directory; give the name of a file, such as `{target / 'FILE'}`")
    if target.exists() and not target.is_file():
        raise UserError(
            f"`{target}` is a device, a pipe or a socket, and a file would take its place; give another name"
        )
    if target.is_symlink():
        target = Path(os.path.realpath(target))
    with writing(target):
        with making(target):
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
            _write_through_names(target.parent)
        finally:
            partial.unlink(missing_ok=True)


def append_line(target: str | Path, line: str) -> None:
    """Add a line to the end of a text file, which a reader finds whole or, after a crash, without its end.

    Raises:
        UserError: the disk refuses.
    """
    with writing(target), open(target, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def _write_through(directory: Path) -> None:
    """Wait until the content of all files below is on the disk: a name must not get there before what it names."""
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            _write_through_names(path)
    _write_through_names(directory)


def _write_through_names(directory: Path) -> None:
    if os.name == "nt":
        return  # it has no handles of directories
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make_readable(path: Path, mode: int) -> None:
    # tempfile and safetensors make what they create private; a checkpoint is as readable as any other file of the user.
    path.chmod(mode & ~_umask())


def _umask() -> int:
    """The process's mask of rights. Who asks for it by setting another leaves files of other threads open for a moment."""
    found = _told_umask()
    return _UMASK_AT_IMPORT if found is None else found


def _told_umask() -> int | None:
    """The mask that the system tells; None where it does not, as elsewhere than on Linux, in old kernels and in gVisor."""
    lines = _STATUS.read_text(encoding="utf-8").splitlines() if _STATUS.exists() else []
    return next((int(line.split()[1], 8) for line in lines if line.startswith("Umask:")), None)


def _set_and_restored_umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


_STATUS = Path("/proc/self/status")
# Where the system does not tell it: here, before there are threads.
_UMASK_AT_IMPORT = 0o022 if _told_umask() is not None else _set_and_restored_umask()
