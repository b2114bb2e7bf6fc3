"""Log once, at INFO to the logger `lowrank_kv`, which implementation an operation runs on, and why."""

import functools
import logging

import torch

LOGGER = logging.getLogger("lowrank_kv")


def log_choice(
    operation: str, backend: str, dtype: torch.dtype, device: torch.device, because: str | None = None
) -> None:
    """Log the choice once. Every layer calls this for every decoded token; that costs 0.1 µs, as no message is built.

    Args:
        operation: its name.
        backend: the implementation, by its module's name.
        dtype, device: of the stored coefficients.
        because: why no faster implementation serves; None for the fastest.
    """
    # Asked before the memoised call, so that a logger enabled later still gets the message.
    if LOGGER.isEnabledFor(logging.INFO):
        _log(operation, backend, dtype, device, because)


@functools.cache
def _log(operation: str, backend: str, dtype: torch.dtype, device: torch.device, because: str | None) -> None:
    name = str(dtype).removeprefix("torch.")
    LOGGER.info("%s: %s (%s on %s)%s", operation, backend, name, device, f", because {because}" if because else "")
