"""How many threads torch has, for as long as a test wants them."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def threads_of(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
