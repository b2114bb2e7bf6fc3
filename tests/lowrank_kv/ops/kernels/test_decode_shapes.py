"""The benchmark's steps as a GPU runs them are right at a few tokens."""

import pytest
import torch

from benchmarks.decode_op import check, steps
from benchmarks.decode_shapes import Shape


@pytest.mark.parametrize("name", steps(64, 64))
def test_a_step_equals_its_reference(device, name, monkeypatch):
    monkeypatch.setattr(Shape, "has_kernels", True)
    shape = Shape(batch=2, heads=4, groups=2, head_dim=128, context=300, dtype=torch.float16, device=device)
    check(name, steps(64, 64)[name](shape), shape.dtype)
