"""What is remembered of a model is given only to equal ones, under equal settings of torch."""

import pytest
import torch
from methods import tiny_model
from remembered import remembered


@pytest.fixture
def made():
    """How often something was made, and a function that makes it of a model, or has it remembered."""
    calls = []

    def make(model):
        calls.append(model)
        return {"weights": torch.zeros(3)}

    key = object()  # of this test alone
    return calls, lambda model: remembered(model, key, make)


def test_equal_models_have_it_made_once_and_each_a_copy(made):
    calls, ask = made
    model = tiny_model()
    first = ask(model)
    first["weights"] += 1
    assert ask(tiny_model())["weights"].tolist() == [0, 0, 0]
    assert len(calls) == 1
    assert calls[0] is not model, "the model is left as it was"


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.lm_head.weight.data[0, 0].add_(1),
        lambda model: setattr(model.config, "rms_norm_eps", 0.5),
        lambda model: model.bfloat16(),
        lambda model: model.train(),
    ],
    ids=["a weight", "the configuration", "the dtype", "the mode"],
)
def test_another_model_has_its_own(made, change):
    calls, ask = made
    ask(tiny_model())
    other = tiny_model()
    change(other)
    for count in (2, 2):
        ask(other)
        assert len(calls) == count


def test_a_model_that_computes_otherwise_is_asked_each_time(made):
    calls, ask = made
    ask(tiny_model())
    hooked, patched = tiny_model(), tiny_model()
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    patched.model.forward = patched.model.forward
    for model in (hooked, patched, tiny_model().to("meta")):
        for _ in range(2):
            ask(model)
            assert calls[-1] is model
    assert len(calls) == 1 + 2 * 3


def test_other_settings_of_torch_have_their_own(made):
    calls, ask = made
    model = tiny_model()
    ask(model)
    with torch.no_grad():
        ask(model)
    with torch.inference_mode():
        ask(model)
    with torch.device("meta"):
        ask(model)
    torch.set_default_dtype(torch.float64)
    try:
        ask(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(calls) == 5
    ask(model)
    assert len(calls) == 5
