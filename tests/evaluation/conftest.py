"""What the tests of peers share."""

import pytest
from methods import calibration_of, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def calibration(model):
    return calibration_of(model, blocks=16, read=True)
