"""The one exception type for mistakes a user can mend, and the hint that many of its messages end with."""

import difflib
from collections.abc import Sequence


class UserError(ValueError):
    """A wrong argument, file or configuration value.

    The message is one paragraph that names the argument, the value found and the remedy. Command-line entry points
    print it without a traceback and exit with status 2; every other exception is a defect and keeps its traceback.
    """


def not_installed(what: str, package: str, *, extra: str) -> UserError:
    """The error where an optional package is missing.

    Args:
        what: needs it, such as ``the task `boxed```.
        package: its name in the package index.
        extra: the extra of this project that has it, at the tested version.
    """
    return UserError(
        f"{what} needs the package `{package}`; install it with `pip install {package}`, or in a checkout with "
        f"`pip install -c constraints.txt -e '.[{extra}]'`"
    )


def nearest(name: str, valid: Sequence[str], kind: str = "keys") -> str:
    """A 'did you mean …?' hint, or the list of valid names when nothing is near; `kind` says what they name."""
    near = difflib.get_close_matches(name, valid, n=1)
    return f"did you mean `{near[0]}`?" if near else f"valid {kind}: {', '.join(sorted(valid))}"
