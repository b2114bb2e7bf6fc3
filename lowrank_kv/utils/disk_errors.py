"""What a disk, its rights or its limits refuse is the user's to mend: one paragraph that names the file, no traceback."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from lowrank_kv.utils.errors import UserError

_REMEDIES = {
    errno.ENOSPC: "make room, or choose another disk",
    errno.EDQUOT: "make room within your quota, or choose another disk",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`), or choose another disk",
    errno.EROFS: "choose a place that is not mounted read-only",
    errno.EACCES: "choose a place that you may write to",
    errno.EPERM: "choose a place that you may write to",
    errno.EIO: "the disk is failing or gone; choose another",
    errno.ESTALE: "the network disk is gone; choose another, or mount it again",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
    errno.ENAMETOOLONG: "choose a shorter name",
}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how safetensors, written in Rust, says what the system said


def explained(error: BaseException, target: str | Path, *, what: str = "written") -> UserError | None:
    """The error as one that a user can mend; None for any other. `what` could not be done with `target`."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, SafetensorError) and (found := _OS_ERROR.search(str(error))):
        number = int(found.group(1))
    if number not in _REMEDIES:
        return None
    why = os.strerror(number).lower()
    return UserError(f"`{target}` cannot be {what}: {why}; {_REMEDIES[number]}; what stood there before is as it was")


@contextlib.contextmanager
def writing(target: str | Path) -> Iterator[None]:
    """Raise :class:`UserError` where a disk refuses what the block writes."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        mended = explained(error, target)
        if mended is None:
            raise
        raise mended from error


@contextlib.contextmanager
def making(target: str | Path) -> Iterator[None]:
    """Raise :class:`UserError` where a directory that is there takes no new file or directory, as those of /proc: the system
    says then that the new one does not exist."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"`{target}` cannot be made there: {error.strerror.lower()}; choose another place") from error
