"""Torch's defaults, for code whose tensors must not depend on what somebody else has set."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def fp32_on_cpu() -> Iterator[None]:
    """New tensors are fp32 and on the CPU unless they say otherwise, whatever :func:`torch.set_default_dtype` and
    :func:`torch.set_default_device` have been told. Servers and scripts set both, for the model that they build."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
