"""Training that starts from what the loss answers to: gradients' moments, weighted bases, gates at the target rate."""

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES
from methods import calibration_of, dynakv_model, tiny_model
from torch import Tensor, nn
from training_runs import merged, rows, train_here

import dynakv
from dynakv.gate import Gate
from dynakv.objective import RateRecorder, RetainRates
from dynakv.training_config import TrainConfig
from lowrank_kv.bases.loss_weighted import weighted_basis
from lowrank_kv.bases.pca import pca_basis
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.calibration.gradient_moments import gradient_moments
from lowrank_kv.hf.attention import TRANSFORM
from lowrank_kv.hf.cache.layer import join_heads, split_heads
from lowrank_kv.hf.geometry import attention_modules, geometry_of
from lowrank_kv.hf.prepare import prepare
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from training.initialization import DEFAULT_PRICE

SIDES = ("key", "value")
GRADIENT = {
    "calibration": {"start": "gradient"},
    "rate": {"target_retain_rate": 0.5, "calibrate_threshold_tokens": 128},
}


def ids(count: int = 3, length: int = 21) -> torch.Tensor:
    return torch.randint(1, 97, (count, length), generator=torch.Generator().manual_seed(5))


def rates_of(model) -> RetainRates:
    with RateRecorder(model) as recorder:
        model(input_ids=ids(), use_cache=False)
    return recorder.rates()


def moments_of(model, blocks):
    found = gradient_moments(model, blocks, progress=False)
    return {(index, side): found[index][side].mean() for index in found for side in SIDES}


def summed_loss(model, block):
    logits = model(input_ids=block[None], use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.double(), block[1:], reduction="sum")


def test_moments_are_those_of_the_projections_gradients():
    model, blocks = tiny_model().double(), ids()
    outputs = {}
    hooks = [
        getattr(module, f"{side[0]}_proj").register_forward_hook(
            lambda _, __, out, name=(index, side): outputs.__setitem__(name, out)
        )
        for index, module in attention_modules(model).items()
        for side in SIDES
    ]
    expected = {}
    for block in blocks:
        loss = summed_loss(model, block)
        for name, gradient in zip(outputs, torch.autograd.grad(loss, list(outputs.values())), strict=True):
            expected[name] = expected.get(name, 0) + gradient[0].T @ gradient[0] / blocks.numel()
    for hook in hooks:
        hook.remove()
    model.requires_grad_(False)
    found = moments_of(model, blocks)
    assert found.keys() == expected.keys()
    for name, moment in found.items():
        # Rotating back and forth costs the rounding of the model's fp32 tables.
        assert float((moment - expected[name]).norm() / expected[name].norm()) < 1e-6


class Shift(nn.Module):
    """Adds a tensor to the joint keys before rotation, and another to the values."""

    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.shifts = [torch.zeros(1, tokens, width, dtype=torch.float64, requires_grad=True) for _ in SIDES]

    def forward(self, key, value, rope, position):
        unrotated = key if rope is None else rope.unrotate(key)
        key, value = (
            split_heads(join_heads(x) + shift, x.shape[-1])
            for x, shift in zip((unrotated, value), self.shifts, strict=True)
        )
        return key if rope is None else rope.rotate(key), value


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_moments_of_every_family(family):
    model, [block] = family.model().double().requires_grad_(False), ids(1)
    found = moments_of(model, block[None])
    assert not any(TRANSFORM in module._modules for module in attention_modules(model).values())
    geometry = geometry_of(model)
    prepare(model)
    shifts = {index: Shift(len(block), geometry.width) for index in geometry.layers}
    for index, shift in shifts.items():
        attention_modules(model)[index]._modules[TRANSFORM] = shift
    summed_loss(model, block).backward()
    for index, shift in shifts.items():
        for side, tensor in zip(SIDES, shift.shifts, strict=True):
            expected = tensor.grad[0].T @ tensor.grad[0] / len(block)
            assert float(expected.norm()) > 0
            torch.testing.assert_close(found[index, side], expected, rtol=1e-6, atol=1e-12)


def test_gradients_leave_no_trace_and_need_an_uncompressed_model():
    model = tiny_model()
    gradient_moments(model, ids(), progress=False)
    assert all(parameter.grad is None for parameter in model.parameters())
    dynakv_model(model, 0.5)
    with pytest.raises(UserError, match="uncompressed"):
        gradient_moments(model, ids(), progress=False)
    assert dynakv.compressors(model)


def test_one_token_predicts_nothing():
    with pytest.raises(UserError, match="blocks of one token"):
        gradient_moments(tiny_model(), ids(3, 1), progress=False)


def test_gradients_that_are_not_finite_name_the_layer():
    model = tiny_model()
    model.model.layers[2].self_attn.v_proj.weight.data[0] = torch.nan
    with pytest.raises(UserError, match="layer 0, key"):
        gradient_moments(model, ids(), progress=False)


def second_moment(width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(4 * width, width, generator=generator, dtype=torch.float64)
    rows = (
        rows
        * torch.logspace(0, -2, width, dtype=torch.float64)
        @ torch.randn(width, width, generator=generator, dtype=torch.float64)
    )
    return rows.T @ rows / len(rows)


def rebuilt_error(moment, basis, inverse, weight) -> float:
    """E[e W eᵀ] of states rebuilt by x · basis · inverse."""
    left = torch.eye(len(moment), dtype=torch.float64) - (basis @ inverse).double()
    return float((left.T @ moment @ left @ weight).trace())


def test_weighted_basis_loses_least_of_all():
    moment, gradient = second_moment(16, 0), second_moment(16, 1)
    basis = weighted_basis(moment, gradient)
    torch.testing.assert_close(basis.basis_CC @ basis.inverse_CC, torch.eye(16), atol=1e-5, rtol=0)
    basis_CC = basis.basis_CC.double()
    torch.testing.assert_close((basis_CC.T @ moment @ basis_CC).diagonal().float(), basis.energy_C)
    assert (basis.energy_C.diff() <= 0).all()
    assert (basis.loss_C.diff() <= 0).all()
    weight = basis_CC @ basis_CC.T
    turn = pca_basis(moment[None]).vectors_PWW[0]
    # What the columns left out hold is what is lost (Eckart and Young); the plain PCA loses more.
    for rank in (1, 5, 12):
        lost = rebuilt_error(moment, basis.basis_CC[:, :rank], basis.inverse_CC[:rank], weight)
        assert lost == pytest.approx(float(basis.energy_C[rank:].sum()), rel=1e-4)
        assert lost < rebuilt_error(moment, turn[:, :rank], turn[:, :rank].T, weight)


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0, 1e12])
def test_gradients_alike_in_all_directions_give_the_pca(scale):
    moment = second_moment(12, 0)
    basis = weighted_basis(moment, scale * torch.eye(12))
    torch.testing.assert_close(basis.energy_C, pca_basis(moment[None]).energy_PW[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(basis.basis_CC.T, basis.inverse_CC, atol=1e-5, rtol=0)


@pytest.mark.parametrize("threshold", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("width", [8, 32, 192, 1024])
def test_gates_start_at_a_rank(width, threshold):
    gate = Gate(width)
    energy = torch.logspace(0, -4, width)
    coef = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0))
    for rank in {1, 3, 8, width // 3, width // 2, width - 1, width}:
        gate.initialize_at(energy, rank, threshold)
        kept = gate.keep(coef, threshold, granularity=1)
        assert int((kept - rank).abs().max()) <= 2
        # Little is attenuated: the soft rank is not far from the hard one.
        assert abs(float(gate(coef).detach().mean()) * width - rank) <= max(8, width / 8)


@pytest.mark.parametrize(
    ("changes", "gradients", "rate"),
    [
        ({}, False, 3e-4),
        ({"rate": {"target_retain_rate": 0.3}}, True, 1e-3),
        ({"rate": {"target_retain_rate": 0.3}, "optimizer": {"lr_projection": 2e-3}}, True, 2e-3),
        ({"rate": {"target_retain_rate": 0.3}, "calibration": {"start": "pca"}}, False, 3e-4),
        ({"rate": {"target_retain_rate": 0.3}, "initial_checkpoint": "run"}, False, 3e-4),
        ({"rate": {"target_retain_rate": 0.3}, "compressor": {"decoder": "orthogonal"}}, False, 3e-4),
        ({"rate": {"target_retain_rate": 0.3}, "compressor": {"rank_policy": "nested"}}, False, 3e-4),
        ({"rate": {"target_retain_rate": 0.3}, "compressor": {"rank_policy": "soft_threshold"}}, False, 3e-4),
    ],
)
def test_what_a_run_starts_from_where_it_is_not_said(changes, gradients, rate):
    values = {"model": "m", "dataset": {"name": "t.txt"}, "compressor": {"rank_policy": "gate"}}
    config = build(TrainConfig, merged(values, changes))
    assert (config.starts_from_gradients, config.lr_projection) == (gradients, rate)


def test_a_run_with_a_target_alone_starts_at_it(training_values, tmp_path):
    values = training_values | {"calibration": {"tokens": 256}}
    train_here(
        values,
        tmp_path / "run",
        rate={"target_retain_rate": 0.5, "calibrate_threshold_tokens": 128},
        optimizer={"steps": 1},
    )
    [row] = rows(tmp_path / "run")
    assert row["hard_rate"] == pytest.approx(0.5, abs=0.05)  # nearly 1 from a PCA


def test_a_run_starts_at_its_target(training_values, tmp_path):
    train_here(training_values, tmp_path / "run", **GRADIENT)
    found = rows(tmp_path / "run")
    assert found[0]["hard_rate"] == pytest.approx(0.5, abs=0.07)  # ranks are rounded to fours of 32
    assert found[0]["hard_rate_keys"] != found[0]["hard_rate_values"]


def test_a_run_begins_with_the_estimated_price(training_values, tmp_path):
    def first_price(name: str, **changes: dict[str, float]) -> float:
        train_here(training_values, tmp_path / name, **merged(GRADIENT, {"optimizer": {"steps": 1}, **changes}))
        return rows(tmp_path / name)[0]["alpha"]

    half, quarter = first_price("half"), first_price("quarter", rate={"target_retain_rate": 0.25})
    assert 0 < half < quarter  # the fewer are kept, the more would one of them save
    assert DEFAULT_PRICE not in (half, quarter)
    assert first_price("weighed", loss={"cross_entropy": 2.0, "distillation": 1.0}) == pytest.approx(3 * half)
    assert first_price("asked for", rate={"alpha": 0.5}) == 0.5


def test_bases_of_a_run_must_have_gradients(training_values, tmp_path):
    from lowrank_kv.hf.loading import load_model

    model = load_model(training_values["model"], dtype="float32")
    for name, gradients in (("with", True), ("without", False)):
        calibration = Calibration.from_text(model, ids(4, 32), gradients=gradients, progress=False)
        calibration.save(tmp_path / name, model=training_values["model"], text=["random"])
    loaded = Calibration.load(tmp_path / "with").gradients()
    expected = gradient_moments(model, ids(4, 32), progress=False)
    torch.testing.assert_close(loaded[1]["key"].mean(), expected[1]["key"].mean(), rtol=1e-5, atol=1e-9)

    def train_from(name: str) -> None:
        start = {"start": "gradient", "bases": str(tmp_path / name)}
        changes = {**GRADIENT, "calibration": start, "optimizer": {"steps": 1, "batch_size": 1}}
        train_here(training_values, tmp_path / f"run {name}", **changes)

    train_from("with")
    assert rows(tmp_path / "run with")[0]["hard_rate"] == pytest.approx(0.5, abs=0.07)
    with pytest.raises(UserError, match="without gradients.*gradients: true"):
        train_from("without")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": {"target_retain_rate": None}}, "rate.target_retain_rate"),
        ({"compressor": {"decoder": "orthogonal"}}, "compressor.decoder.*start: pca.*orthogonal"),
        ({"compressor": {"rank_policy": "nested"}}, "compressor.rank_policy.*start: pca.*nested"),
        ({"compressor": {"rank_policy": "soft_threshold"}}, "compressor.rank_policy.*start: pca.*soft_threshold"),
    ],
)
def test_what_cannot_start_from_gradients(training_values, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train_here(training_values, tmp_path / "run", **{**GRADIENT, **changes})
    assert not (tmp_path / "run").exists()


def test_attaching_spreads_ranks_by_the_estimated_loss():
    model = tiny_model()
    gradients, moments = gradient_moments(model, ids(), progress=False), calibration_of(model).second_moments()
    # As if the last layer's keys did not matter at all.
    gradients[2]["key"].sum_CC.mul_(1e-9)
    dynakv.add_compressors(model, dynakv.DynaKVConfig(granularity=1))
    dynakv.initialize_from_gradients(model, moments, gradients, 0.5)
    dynakv.use_dynakv_cache(model)
    assert model(input_ids=ids(), use_cache=True).past_key_values.rate == pytest.approx(0.5, abs=0.05)
    hard_L2 = rates_of(model).hard_L2
    assert len(hard_L2.unique()) > 3
    assert int(hard_L2.argmin()) == 2 * 2, "keys of layer 2"
    assert float(hard_L2[2, 0]) <= 3 / 32


def test_no_layer_begins_below_its_floor():
    gradients = gradient_moments(tiny_model(), ids(), progress=False)
    moments = calibration_of(tiny_model()).second_moments()

    def started(floor: float) -> tuple[float, float, float]:
        """The price, the lowest rate of a layer's keys or values, and the mean of all."""
        model = tiny_model()
        dynakv.add_compressors(model, dynakv.DynaKVConfig(granularity=1))
        price = dynakv.initialize_from_gradients(model, moments, gradients, 0.3, floor=floor)
        dynakv.use_dynakv_cache(model)
        rates = rates_of(model.train())
        return price, float(rates.hard_L2.min()), rates.hard

    (_, least, mean), (price, floored, same) = started(0.0), started(0.25)
    assert least < 0.2 < 0.25 - 1 / 32 <= floored
    assert same == pytest.approx(mean, abs=0.03)
    assert 0 < price < started(0.29)[0] < float("inf")  # what is left to spread is dearer


def test_dear_keys_begin_with_fewer_coefficients():
    gradients, moments = (
        gradient_moments(tiny_model(), ids(), progress=False),
        calibration_of(tiny_model()).second_moments(),
    )

    def kept(key_cost: float) -> tuple[float, float]:
        model = tiny_model()
        dynakv.add_compressors(model, dynakv.DynaKVConfig(granularity=1))
        dynakv.initialize_from_gradients(model, moments, gradients, 0.5, key_cost=key_cost)
        dynakv.use_dynakv_cache(model)
        return tuple(rates_of(model).hard_L2.mean(dim=0).tolist())

    (keys, values), (fewer, more) = kept(1.0), kept(20.0)
    assert fewer < keys - 0.02
    assert more > values + 0.02
    assert fewer + more == pytest.approx(keys + values, abs=0.05)


@pytest.mark.parametrize("key_cost", [1.0, 5.0])
@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_the_starting_price_is_what_the_next_coefficients_would_save(rate, key_cost):
    """Ranks from just below the rate to just above it take from the estimated loss what they add to α R²."""
    gradients = gradient_moments(tiny_model(), ids(), progress=False)
    moments = calibration_of(tiny_model()).second_moments()
    bases = {
        (index, side): weighted_basis(moments[index][side].mean(), gradients[index][side].mean())
        for index in moments
        for side in SIDES
    }

    def started_at(rate: float) -> tuple[float, Tensor, float]:
        """The price, soft and hard rates as training sees them (each weighed by its cost), and the estimated loss."""
        model = tiny_model()
        dynakv.add_compressors(model, dynakv.DynaKVConfig(granularity=1))
        price = dynakv.initialize_from_gradients(model, moments, gradients, rate, key_cost=key_cost)
        dynakv.use_dynakv_cache(model)
        rates = rates_of(model.train())
        lost = 0.0
        for (index, side), basis in bases.items():
            rank = round(float(rates.hard_L2[index, SIDES.index(side)]) * len(basis.loss_C))
            lost += float(basis.loss_C[rank:].sum())
        both = torch.stack([rates.soft_L2.detach(), rates.hard_L2]) * torch.tensor([key_cost, 1.0]) * 2 / (key_cost + 1)
        return price, both.mean(dim=(1, 2)), lost

    price, (soft, _), _ = started_at(rate)
    _, (_, below), lost_below = started_at(rate - 0.04)
    _, (_, above), lost_above = started_at(rate + 0.04)
    assert price * 2 * float(soft * (above - below)) == pytest.approx(lost_below - lost_above, rel=0.15)
