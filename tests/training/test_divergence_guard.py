"""A run that has gone wrong stops, and says where."""

import math
import re

import pytest
import torch
from training_runs import rows, train_here

import training.loop
from dynakv import compressors
from lowrank_kv.utils.errors import UserError
from training.divergence_guard import DivergenceGuard, parameter_place

NAMES = [f"model.layers.{i}.self_attn.kv_compressor.key.projection.weight" for i in range(3)]


def test_before_the_first_state_it_says_so(tmp_path):
    rates, squares = torch.full((3, 2), 0.5), torch.tensor([1.0, math.inf, 1.0])
    message = "a gradient is not finite in layer 1 keys.*no checkpoint was written before.*, and start it again$"
    with pytest.raises(UserError, match=message):
        a_guard(tmp_path).check(1, 5.0, 4.0, rates, squares)


def a_guard(path, max_loss_increase=3.0):
    return DivergenceGuard(NAMES, [0, 1, 2], max_loss_increase, path / "states")


def poison(monkeypatch, spoil):
    """Call ``spoil(model)`` right before the fourth step."""
    whole = training.loop.optimizer_step

    def step(engine, batches, alpha, *, number, gradient_norms, guard):
        if number == 4:
            spoil(engine.model)
        return whole(engine, batches, alpha, number=number, gradient_norms=gradient_norms, guard=guard)

    monkeypatch.setattr(training.loop, "optimizer_step", step)


def backbone(model):
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = math.nan


def gate(model):
    compressors(model)[1].value.gate.bias.data[3] = math.nan


def backward(model):
    def spoil_gradient(module, args, output):
        output.register_hook(lambda gradient: gradient * math.nan)

    model.model.layers[1].mlp.register_forward_hook(spoil_gradient)


def projection(model):
    compressors(model)[1].key.projection.weight.data.zero_()


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (backbone, "the loss is nan in layer 1 values, where it appears first"),
        (gate, "the loss is nan in layer 1 values, where it appears first"),
        (backward, "a gradient is not finite in layer 1 values, gate."),
        (projection, "the projection U of layer 1 keys is singular"),
    ],
)
def test_what_is_not_finite_ends_the_run(training_values, tmp_path, monkeypatch, spoil, what):
    poison(monkeypatch, spoil)
    with pytest.raises(UserError) as caught:
        train_here(training_values, tmp_path / "run", checkpoint_every=2)
    message = str(caught.value)
    assert f"training stopped at step 4: {what}" in message
    assert f"the last good checkpoint is {tmp_path}/run/states/step-000002" in message
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "run/states").iterdir()) == ["step-000002"]
    # And the run goes on from there once the cause is gone.
    monkeypatch.undo()
    train_here(training_values, tmp_path / "run", checkpoint_every=2, resume=True)
    assert len(rows(tmp_path / "run")) == 8


def test_a_projection_that_can_hardly_be_inverted_does_not_replace_a_good_state(training_values, tmp_path, monkeypatch):
    def lean(model):
        compressors(model)[1].key.projection.weight.data[:, 0] *= 1e-6

    poison(monkeypatch, lean)
    with pytest.raises(UserError) as caught:
        train_here(training_values, tmp_path / "run", checkpoint_every=2)
    assert "training stopped at step 4: the projection U of layer 1 keys has condition number" in str(caught.value)
    assert f"the last good checkpoint is {tmp_path}/run/states/step-000002" in str(caught.value)
    assert sorted(path.name for path in (tmp_path / "run/states").iterdir()) == ["step-000002"]


def test_divergence_is_told_from_hard_text(tmp_path):
    rates, squares = torch.full((3, 2), 0.5), torch.tensor([1.0, 9.0, 4.0])
    guard = a_guard(tmp_path)
    for step in range(1, 60):
        guard.check(step, 5.0, 4.0 + (step % 7 == 0) * 6.0, rates, squares)  # single hard texts
    with pytest.raises(UserError) as caught:
        [guard.check(step, 20.0, 10.0, rates, squares) for step in range(60, 120)]
    assert "the run diverges" in str(caught.value)
    assert "layer 1 keys, projection.weight, which has the largest gradient" in str(caught.value)
    assert 65 < int(re.search(r"step (\d+):", str(caught.value)).group(1)) < 90
    tolerant = a_guard(tmp_path, max_loss_increase=0.0)
    for step in range(1, 100):
        tolerant.check(step, 5.0, float(step), rates, squares)


def test_its_memory_survives_a_resume(tmp_path):
    one, other = a_guard(tmp_path), a_guard(tmp_path)
    rates, squares = torch.full((3, 2), 0.5), torch.ones(3)
    for step in range(1, 25):
        one.check(step, 5.0, 5.0 + step % 3, rates, squares)
    other.load(one.state())
    assert other.state() == one.state()
    assert math.isfinite(other.lowest)


def test_places_read_well():
    assert parameter_place(NAMES[2]) == "layer 2 keys, projection.weight"
    joint = "model.layers.5.self_attn.kv_compressor.key_value.projection.weight"
    assert parameter_place(joint) == "layer 5 keys and values, projection.weight"
    assert parameter_place("model.layers.7.mlp.up_proj.weight") == "layer 7, mlp.up_proj.weight"
    assert parameter_place("lm_head.weight") == "lm_head.weight"
