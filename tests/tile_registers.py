"""Whether compiled code multiplies in tile registers (AMX), for as long as a test wants it."""

import contextlib
from collections.abc import Iterator

from lowrank_kv.ops.native.library import library


def has_tiles() -> bool:
    """Whether the processor has them and the system lets this process use them."""
    return library() is not None and bool(library().use_tiles(1))


@contextlib.contextmanager
def tiles_or_not(wanted: bool) -> Iterator[None]:
    if library() is None:
        yield
        return
    library().use_tiles(wanted)
    try:
        yield
    finally:
        library().use_tiles(1)
