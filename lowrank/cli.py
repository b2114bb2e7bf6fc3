"""How every command of the project ends: a user's mistake is one paragraph and status 2, never a traceback."""

import sys
from collections.abc import Callable

from lowrank.errors import UserError


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
