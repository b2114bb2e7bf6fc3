"""The objective of training and the controller of its price."""

import pytest
import torch
from methods import dynakv_model, tiny_model

import dynakv
from dynakv.objective import RateController, RateRecorder, objective


def test_objective_is_equation_9():
    model = tiny_model()
    dynakv_model(model, 0.4)
    model.train()
    ids = torch.randint(1, 97, (1, 20), generator=torch.Generator().manual_seed(0))
    masks = {}
    for side in dynakv.token_compressors(model):
        side.register_forward_hook(lambda side, arguments, outputs: masks.update({side: outputs[1]}))
    with RateRecorder(model) as recorder:
        cross_entropy = model(ids, labels=ids).loss
    soft = torch.stack(list(masks.values())).mean()
    torch.testing.assert_close(objective(cross_entropy, recorder.rates(), 3.0), cross_entropy + 3.0 * soft**2)


def test_controller_reaches_the_target():
    # A plant whose rate falls as the price of keeping rises, and follows it with a lag.
    controller, rate = RateController(1.0, target=0.3, gain=20.0, ramp=0.5), 1.0
    for step in range(400):
        rate += 0.2 * (1 / (1 + controller.alpha) - rate)
        controller.update(rate, step / 400)
    assert rate == pytest.approx(0.3, abs=0.01)


def test_a_controller_goes_on_from_the_rate_it_finds():
    # The same plant at rest at half of the coefficients: asked for 0.3, it need not first open again.
    controller, rate = RateController(1.0, target=0.3, gain=20.0, ramp=0.5), 0.5
    for step in range(400):
        rate += 0.2 * (1 / (1 + controller.alpha) - rate)
        controller.update(rate, step / 400)
        assert rate < 0.51
    assert rate == pytest.approx(0.3, abs=0.01)


def test_a_controller_goes_on_from_its_state_alone():
    settings = {"target": 0.3, "gain": 20.0, "ramp": 0.5}
    controller = RateController(7.0, **settings)
    controller.update(0.8, 0.1)
    other = RateController(**controller.state(), **settings)
    for one in (controller, other):
        one.update(0.7, 0.2)
    assert other.state() == controller.state()
    assert controller.alpha != 7.0


def test_a_goal_does_not_go_up_again_where_a_run_is_resumed_with_more_steps():
    settings = {"target": 0.3, "gain": 20.0, "ramp": 0.5}
    controller = RateController(7.0, **settings)
    for progress in (0.0, 0.5, 1.0):
        controller.update(0.9, progress)
    longer = RateController(**controller.state(), **settings)
    for one in (controller, longer):
        one.update(0.4, 1.0 if one is controller else 0.1)
    assert longer.alpha == controller.alpha


def test_a_rate_that_never_comes_down_does_not_overflow_and_turns_round_at_once():
    controller = RateController(1.0, target=0.1, gain=100.0, ramp=0.0)
    for _ in range(2000):
        controller.update(0.7, 1.0)
    highest = controller.alpha
    assert 1e6 < highest < 1e10
    for _ in range(20):
        controller.update(0.05, 1.0)
    assert controller.alpha < highest / 100


def test_without_a_target_alpha_is_fixed():
    controller = RateController(4.0, target=None, gain=20.0, ramp=0.5)
    controller.update(0.9, 1.0)
    assert controller.alpha == 4.0
