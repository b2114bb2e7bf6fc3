"""Saying once which of its implementations an operation runs on, and why: at INFO, to the logger `lowrank_kv`."""

import functools
import logging

import torch

LOGGER = logging.getLogger("lowrank_kv")


def log_choice(
    operation: str, backend: str, dtype: torch.dtype, device: torch.device, because: str | None = None
) -> None:
    """Say it, unless it has been said. For every decoded token of every layer: 0.1 µs, if nothing is put together for it.

    Args:
        operation: what is done.
        backend: the implementation, by its module's name.
        dtype, device: of what is held.
        because: what keeps a faster one from it; None for the fastest there is.
    """
    # Asked here, so that it is still said to who begins to listen late.
    if LOGGER.isEnabledFor(logging.INFO):
        _log(operation, backend, dtype, device, because)


@functools.cache
def _log(operation: str, backend: str, dtype: torch.dtype, device: torch.device, because: str | None) -> None:
    name = str(dtype).removeprefix("torch.")
    LOGGER.info("%s: %s (%s on %s)%s", operation, backend, name, device, f", because {because}" if because else "")
