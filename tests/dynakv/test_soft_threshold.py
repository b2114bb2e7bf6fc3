"""Soft thresholds: what they keep, and that a cache serves what training computes."""

import math

import pytest
import torch
from methods import dynakv_model, tiny_model
from tensors_held import found_tensors

import dynakv
from dynakv.checkpoint_files import read_config
from dynakv.config import DECODERS
from dynakv.measured_rates import measured_rates
from dynakv.objective import RateRecorder, objective
from dynakv.soft_threshold import SoftThreshold
from lowrank_kv.utils.errors import UserError
from training.soft_thresholds import fix_ranks


def token_ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(0))


def thresholded(decoder: str = "decoupled", *, rate: float | None = None, granularity: int = 1):
    """A tiny model whose thresholds are apart, with ranks that are fixed at `rate`, if it is given."""
    model = tiny_model()
    dynakv_model(model, 1, rank_policy="soft_threshold", decoder=decoder, granularity=granularity)
    for number, side in enumerate(dynakv.token_compressors(model)):
        side.gate.theta.data.fill_(0.4 - 0.2 * number)
    if rate is not None:
        fix_ranks(model, rate)
    return model


def test_factors_are_the_definition_s():
    gate = SoftThreshold(5)
    gate.initialize(torch.tensor([9.0, 4.0, 1.0, 0.25, 0.0]), decay=4.0)
    gate.theta.data.fill_(-0.4)
    energies = [9.0, 4.0, 1.0, 0.25, 9e-6]  # what was never used counts as a millionth of the largest
    sigmas = [math.sqrt(energy / (sum(energies) / 5)) for energy in energies]
    threshold = math.log1p(math.exp(-0.4))
    expected = [(sigma - threshold) / sigma for sigma in sigmas if sigma > threshold]
    assert len(expected) == 3
    torch.testing.assert_close(gate.factors().tolist(), expected, rtol=1e-5, atol=0)
    assert gate.rate == 3 / 5
    relative_C = gate.relative_energies()
    torch.testing.assert_close(relative_C.tolist(), [(s / threshold) ** 2 for s in sigmas], rtol=1e-5, atol=0)
    gate.fix(2)
    assert gate.factors().tolist() == [1, 1]
    assert gate.rate == 2 / 5
    gate.learn()
    assert gate.rate == 3 / 5


def test_the_start_keeps_every_coefficient():
    gate = SoftThreshold(6)
    gate.initialize(torch.tensor([900.0, 40.0, 1.0, 0.5, 0.25, 0.2]), decay=4.0)
    assert gate.rate == 1
    assert float(gate.factors()[-1]) == pytest.approx(0.5, abs=1e-4)
    assert float(gate.factors()[0]) == pytest.approx(1, abs=0.01)


def test_a_threshold_above_everything_leaves_one_coefficient():
    gate = SoftThreshold(6)
    gate.theta.data.fill_(50.0)
    assert gate.factors().tolist() == [0]
    assert gate.rate == 1 / 6


@pytest.mark.parametrize("decoder", DECODERS)
@torch.no_grad()
def test_without_thresholds_the_model_is_the_dense_one(decoder):
    model, ids = tiny_model(), token_ids(2, 24)
    dense = model(ids, use_cache=False).logits
    dynakv_model(model, 1, rank_policy="soft_threshold", decoder=decoder)
    torch.testing.assert_close(model(ids).logits, dense, atol=1e-4, rtol=0)
    torch.testing.assert_close(model.train()(ids, use_cache=False).logits, dense, atol=1e-4, rtol=0)


@pytest.mark.parametrize("decoder", DECODERS)
@torch.no_grad()
def test_a_cache_serves_what_training_computes(decoder):
    model, ids = thresholded(decoder, rate=0.4), token_ids(2, 30)
    trained = model.train()(ids, use_cache=False).logits
    model.eval()
    torch.testing.assert_close(model(ids, use_cache=False).logits, trained, atol=2e-5, rtol=0)
    cache = dynakv.DynaKVCache.from_model(model)
    parts = (ids[:, :17], *ids[:, 17:].split(1, dim=1))
    served = torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)
    torch.testing.assert_close(served, trained, atol=2e-5, rtol=0)


@pytest.mark.parametrize("granularity", [1, 4])
@torch.no_grad()
def test_ranks_are_fixed_at_the_target_by_one_factor_on_all_thresholds(granularity):
    model = thresholded(granularity=granularity)
    sides = dynakv.token_compressors(model)
    before = [side.gate.rate for side in sides]
    assert fix_ranks(model, 0.4) == pytest.approx(0.4, abs=granularity / 32 / 6)
    ranks = [int(side.gate.rank) for side in sides]
    assert sum(ranks) / (6 * 32) < sum(before) / 6 - 0.1
    assert len(set(ranks)) > 2
    assert all(rank % granularity == 0 for rank in ranks)
    if granularity == 1:
        kept = min(float(side.gate.relative_energies()[rank - 1]) for side, rank in zip(sides, ranks, strict=True))
        left = max(float(side.gate.relative_energies()[rank]) for side, rank in zip(sides, ranks, strict=True))
        assert kept > left, "what is dropped is below all that is kept, by the factor of its own threshold"


def test_a_floor_holds_for_each_layer_s_keys_and_values():
    model = thresholded()
    for number, side in enumerate(dynakv.token_compressors(model)):
        side.gate.theta.data.fill_(4.0 if number else -1.0)
    assert fix_ranks(model, 0.4) == pytest.approx(0.4, abs=0.01)
    gates = [side.gate for side in dynakv.token_compressors(model)]
    assert min(gate.rate for gate in gates) < 0.3
    assert fix_ranks(model, 0.4, floor=0.3) == pytest.approx(0.4, abs=0.01)
    assert min(gate.rate for gate in gates) == 10 / 32


@torch.no_grad()
def test_bytes_are_those_of_the_ranks():
    model, ids = thresholded(rate=0.4), token_ids(1, 200)
    cache = model(ids).past_key_values
    storages = [tensor.untyped_storage() for _, tensor in cache.tensors_by_kind()]
    assert found_tensors(cache) <= {storage.data_ptr() for storage in storages}
    assert cache.nbytes == sum(storage.nbytes() for storage in storages)
    assert 0.4 < cache.rate < 0.46  # the places of rows, and rotations


@torch.no_grad()
def test_a_checkpoint_serves_as_the_model_it_was_saved_from(tmp_path):
    model, ids = thresholded(rate=0.4), token_ids(2, 24)
    expected = model(ids)
    dynakv.save_compressor(model, tmp_path / "c")
    loaded = dynakv.attach(tiny_model(), tmp_path / "c")
    found = loaded(ids)
    assert torch.equal(found.logits, expected.logits)
    assert found.past_key_values.rate == expected.past_key_values.rate
    rates = measured_rates(tmp_path / "c", read_config(tmp_path / "c"))
    sides = dynakv.token_compressors(model)
    assert (rates.keys, rates.values) == tuple([side.gate.rate for side in sides[start::2]] for start in (0, 1))
    assert rates.mean == pytest.approx(0.4, abs=0.01)


def test_the_price_raises_thresholds_and_the_task_moves_what_is_kept():
    model, ids = thresholded(), token_ids(2, 20)
    model.train()
    with RateRecorder(model) as recorder:
        loss = model(ids, labels=ids).loss
    rates, sides = recorder.rates(), dynakv.token_compressors(model)
    found = [rate for pair in rates.hard_L2.tolist() for rate in pair]
    assert found == pytest.approx([side.gate.rate for side in sides])
    objective(loss.detach(), rates, 1.0).backward(retain_graph=True)
    for side in sides:
        assert side.gate.theta.grad < 0, "a step down raises the threshold"
        assert all(parameter.grad is None for parameter in side.projection.parameters())
    loss.backward()
    for side in sides:
        rank = round(side.gate.rate * side.width)
        for grad_CC in (side.projection.weight.grad.T, side.projection.decoder.grad):
            assert grad_CC[:rank].any()
            assert not grad_CC[rank:].any()


def test_fixed_ranks_have_no_price():
    model, ids = thresholded(rate=0.4), token_ids(2, 20)
    model.train()
    with RateRecorder(model) as recorder:
        loss = model(ids, labels=ids).loss
    objective(loss, recorder.rates(), 1.0).backward()
    assert recorder.rates().hard == pytest.approx(0.4, abs=0.01)
    for side in dynakv.token_compressors(model):
        assert not side.gate.theta.grad.any()  # there is one: engines ask for the gradient of every parameter
        assert side.projection.weight.grad.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask": "soft_prefix"}, "`mask` must be `hard` where `rank_policy` is soft_threshold"),
        ({"rebuild_cost": 1.0}, "`rebuild_cost` must be 0 where `rank_policy` is not plan"),
        ({"own_directions": 2}, "`own_directions` must be 0 where `rank_policy` is soft_threshold"),
    ],
)
def test_settings_of_other_policies_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        dynakv.DynaKVConfig(rank_policy="soft_threshold", **settings)
