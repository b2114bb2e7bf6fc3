"""Learned classes of tokens against a plain form in fp64: what a token is partly of, what it takes, and their gradients.

Shapes: T tokens, C coefficients, K classes, R coefficients that are kept at most.
"""

import math

import pytest
import torch
from methods import planned_model, tiny_model

import dynakv
from dynakv.planned_bits import PlannedBits
from lowrank_kv.stores.token_plans import PLACE_BYTES, TokenPlans

SOFTNESS = 0.5  # of the module: log w over which a token is partly of two classes


def planned(*, learns_classes: bool = True) -> PlannedBits:
    """Of one layer's keys, in four classes."""
    model = tiny_model()
    planned_model(model, 0.15, token_classes=4)
    gate = next(iter(dynakv.token_compressors(model))).gate
    found = PlannedBits(gate.bits.shape[1], learns_classes=learns_classes)
    found.load_state_dict(gate.state_dict())
    return found


def coefficients(planned: PlannedBits, count: int = 40) -> torch.Tensor:
    """With scores on both sides of every bound, (T, C) fp32."""
    generator = torch.Generator().manual_seed(1)
    coef_TC = torch.randn(count, planned.bits.shape[1], generator=generator) * torch.linspace(0.5, 2, count)[:, None]
    assert len(set(planned.plan.classes(coef_TC).tolist())) > 1
    return coef_TC


def mixed(planned: PlannedBits, coef_TC: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Coefficients and rate of tokens that are partly of each class, token by token, in fp64."""
    plan = planned.plan
    bounds, sizes = plan.bounds_K.double().tolist(), plan.row_bytes()
    mixed_TR = torch.zeros(len(coef_TC), plan.num_coefficients, dtype=torch.float64)
    size = 0.0
    for mixed_R, coef_C, score in zip(mixed_TR, coef_TC, plan.gate.scores(coef_TC).double().tolist(), strict=True):
        at_least = [1.0, *(1 / (1 + math.exp((bound - score) / SOFTNESS)) for bound in bounds), 0.0]
        for k, each in enumerate(plan.plans):
            share = at_least[k] - at_least[k + 1]
            rank = each.num_coefficients
            mixed_R[:rank] += share * each.rounded(coef_C[None, :rank])[0].double()
            size += share * sizes[k] / len(coef_TC)
    return mixed_TR, (size + PLACE_BYTES) / (2 * coef_TC.shape[1])


def test_in_training_tokens_are_partly_of_each_class():
    planned_bits = planned().train()
    coef_TC = coefficients(planned_bits)
    found_TR, soft, hard = planned_bits(coef_TC)
    expected_TR, rate = mixed(planned_bits, coef_TC)
    # Shares below a thousandth count as none.
    torch.testing.assert_close(found_TR.double(), expected_TR, atol=1e-2, rtol=0)
    assert float(soft) == pytest.approx(rate, rel=2e-3)
    assert float(hard) == pytest.approx(float(planned_bits.eval()(coef_TC)[2]), rel=1e-6)


def test_once_trained_each_token_is_of_one_class():
    learned, fixed = planned().eval(), planned(learns_classes=False).train()
    coef_TC = coefficients(learned)
    for found, expected in zip(learned(coef_TC), fixed(coef_TC), strict=True):
        assert torch.equal(found, expected)
    assert not learned(coef_TC)[1].requires_grad


@pytest.mark.parametrize("name", ["linear", "square", "rest", "bounds"])
def test_gradients_are_what_the_mixture_changes_by(name):
    planned_bits = planned().train()
    coef_TC = coefficients(planned_bits)
    generator = torch.Generator().manual_seed(2)
    weight_TR = torch.randn(len(coef_TC), planned_bits.plan.num_coefficients, generator=generator)

    def value() -> torch.Tensor:
        mixed_TR, soft, _ = planned_bits(coef_TC)
        return (weight_TR * mixed_TR).sum() + 100 * soft

    parameter = getattr(planned_bits, name)
    step = 1e-2 * torch.randn(parameter.shape, generator=generator)
    value().backward()
    expected = float((parameter.grad * step).sum())
    found = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter += sign * step
            found.append(float(value()))
            parameter -= sign * step
    assert expected != 0
    assert (found[0] - found[1]) / 2 == pytest.approx(expected, rel=0.05)


def test_coefficients_get_gradients_by_the_share_that_keeps_them():
    planned_bits = planned().train()
    coef_TC = coefficients(planned_bits).requires_grad_()
    planned_bits(coef_TC)[0].sum().backward()
    least = planned_bits.plan.plans[0].num_coefficients
    assert torch.allclose(coef_TC.grad[:, :least], torch.ones(()), atol=1e-5), "every class keeps these"
    assert (coef_TC.grad.diff(dim=1) <= 1e-6).all()
    assert ((coef_TC.grad > 0.01) & (coef_TC.grad < 0.99)).any()


def test_bounds_that_pass_each_other_leave_a_class_empty():
    planned_bits = planned()
    coef_TC = coefficients(planned_bits)
    assert 1 in planned_bits.plan.classes(coef_TC).tolist()
    with torch.no_grad():
        planned_bits.bounds[1] = planned_bits.bounds[0] - 5
    assert 1 not in planned_bits.plan.classes(coef_TC).tolist()
    assert torch.isfinite(planned_bits.train()(coef_TC)[0]).all()


def test_a_plan_is_the_same_until_something_changes():
    planned_bits = planned()
    before = planned_bits.plan
    assert isinstance(before, TokenPlans)
    assert planned_bits.plan is before
    with torch.no_grad():
        planned_bits.bounds.data = planned_bits.bounds.data + 1  # as engines do that gather what they shard
    assert planned_bits.plan is not before
    assert planned_bits.plan.plans is before.plans
    assert torch.equal(before.bounds_K + 1, planned_bits.plan.bounds_K), "what a cache was made with stays"


def test_a_class_that_has_16_bits_alone_is_where_its_gate_is():
    """Codebooks, which otherwise say where, it has none."""
    gate = PlannedBits(8).to("meta")
    assert gate._plan_of([16] * 8).byte_R.device == gate._plan_of([16] * 4 + [4] * 4).byte_R.device == gate.bits.device
