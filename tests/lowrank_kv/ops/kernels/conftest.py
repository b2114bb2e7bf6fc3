"""These tests need kernels that run: on a GPU, or in a process with TRITON_INTERPRET=1, which
tests/lowrank_kv/ops/test_interpreted_kernels.py starts."""

import os

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
