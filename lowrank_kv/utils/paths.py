"""Where the package keeps what it downloads, and how configuration files refer to it."""

import glob
import os
import re
from pathlib import Path

from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.values import check_type

HOME_VARIABLE = "LOWRANK_KV_HOME"


def path_of(path: str | os.PathLike, name: str = "path") -> Path:
    """A path that a user gives, a leading ``~`` replaced by the user's directory; also a parser's type.

    Args:
        name: the argument, for errors.

    Raises:
        UserError: it is no path.
    """
    check_type(name, path, str | os.PathLike, "a path, such as 'runs/mine'")
    return Path(os.path.expanduser(path))


def home() -> Path:
    """The user cache directory: ``$LOWRANK_KV_HOME``, by default ``~/.cache/lowrank-kv``."""
    # Set to nothing, as a shell clears it for one command, is not the present directory.
    return path_of(os.environ.get(HOME_VARIABLE) or "~/.cache/lowrank-kv")


def demo_model() -> Path:
    """Where `make assets` puts the demo's model."""
    return home() / "SmolLM2-135M-Instruct"


def name_of(source: str) -> str:
    """How results call a hub id, or a file, directory or pattern: by the last part, as the rest is this machine's own."""
    path = path_of(source)
    is_here = path.exists() or path.is_absolute() or ("://" not in source and glob.has_magic(source))
    return path.name if is_here else source


def files_of(name: str) -> list[str]:
    """The files that a path or a pattern names, sorted; a file that is there is not taken for a pattern."""
    name = os.path.expanduser(name)
    return [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))


def expand(text: str) -> str:
    """Replace ``${NAME}`` by the environment variable NAME and a leading ``~`` by the user's directory.

    ``${LOWRANK_KV_HOME}`` has a default (see :func:`home`); any other unset variable is an error.
    """

    def value_of(match: re.Match) -> str:
        name = match.group(1)
        if name == HOME_VARIABLE:
            return str(home())
        if name not in os.environ:
            raise UserError(
                f"`{text}` uses the environment variable {name}, which is not set; set it or write the path"
            )
        return os.environ[name]

    return os.path.expanduser(re.sub(r"\$\{(\w+)\}", value_of, text))
