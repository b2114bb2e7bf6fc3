"""What Triton's kernels ask of a device."""

import contextlib
import functools
import importlib.util
import os
from contextlib import AbstractContextManager

import torch

# Set to 0 to do without Triton's kernels.
SWITCH = "LOWRANK_KV_TRITON"


def may_launch() -> bool:
    """Whether Triton is installed and not switched off; no device is asked."""
    return os.environ.get(SWITCH) != "0" and importlib.util.find_spec("triton") is not None


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device: on an NVIDIA GPU since Ampere, or where they are interpreted."""
    if not may_launch():
        return False
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return os.environ.get("TRITON_INTERPRET") == "1"


def launching_on(device: torch.device) -> AbstractContextManager:
    """Within it kernels are launched on the device: Triton takes the current one, which a layer's need not be."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
