"""How far a kernel may be from the fp64 reference."""

import torch
from torch import Tensor

ALLOWED = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """The norm of the difference, relative to the expected one's."""
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error <= ALLOWED[dtype], f"relative error {error:.2e}, allowed {ALLOWED[dtype]}"
