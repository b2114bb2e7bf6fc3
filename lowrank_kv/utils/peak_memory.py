"""The most memory that this process has held so far."""

import resource
import sys

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes: of CUDA's allocator on a GPU, else resident, of the whole process since it started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
