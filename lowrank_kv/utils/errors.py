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
    """A 'did you mean …?' hint, or the list of valid names when nothing is near; `kind` says what they name.

    Names within sections have dots (``optimizer.steps``): who gives a section, or a key without its section, is told all.
    """
    bare = {_bare(each): each for each in valid}
    given = _bare(name)
    whole = [each for key, each in bare.items() if given in key.split(".")]
    near = [bare[key] for key in difflib.get_close_matches(given, list(bare), n=1)]
    if found := whole or near:
        spelled = map(_spelled if kind == "keys" else "`{}`".format, found)
        return f"did you mean {'one of ' if len(found) > 1 else ''}{', '.join(spelled)}?"
    return f"valid {kind}: {', '.join(sorted(valid))}"


def _bare(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _spelled(name: str) -> str:
    """A key as files and options have it, and where it is in a section as an argument in Python, too."""
    section, dot, key = name.partition(".")
    in_python = bool(dot) and section.isidentifier() and key.isidentifier()  # an option of a command is typed as it is
    return f"`{name}` (in Python `{section}={{'{key}': …}}`)" if in_python else f"`{name}`"
