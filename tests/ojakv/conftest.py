"""A model, its calibration and a text, for all tests of OjaKV's own."""

import pytest
import torch
from methods import calibration_of, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def calibration(model):
    return calibration_of(model, read=True)


@pytest.fixture
def ids():
    return torch.randint(1, 97, (2, 150), generator=torch.Generator().manual_seed(5))
