"""Bases that stay, weighed by the loss: one calibration with gradients serves presets without bits, too."""

import pytest
import torch
from methods import tiny_model

import lowrank_kv
from lowrank_kv.bases.pca import parts_of
from lowrank_kv.calibration.activation_moments import KEY, VALUE
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVConfig, make_plan

SETTINGS = {"joint_layers": 0, "progress": False, "self_check": False}


def ids_of(blocks: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 97, (blocks, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def calibration():
    return Calibration.from_text(tiny_model(), ids_of(4, 160), read_gradients=True, **SETTINGS)


def config_of(preset: str = "static-joint-pf", **settings) -> OjaKVConfig:
    return OjaKVConfig.preset(preset, **settings)


def estimated_losses(calibration: Calibration, config: OjaKVConfig) -> list[float]:
    """½ E[e G eᵀ], to second order what the errors of rebuilt states add to the loss; of each layer's keys and values."""
    plan, heads, found = make_plan(calibration, config), calibration.geometry.num_kv_heads, []
    for index, bases in plan.layers.items():
        for side, basis in zip((KEY, VALUE), bases, strict=True):
            read = calibration.read_states()[index][side]
            decoder_PWR = basis.vectors_PWR if basis.decoder_PWR is None else basis.decoder_PWR
            moments = (
                parts_of(m_CC, layout=config.layout, num_heads=heads) for m_CC in (read.state_CC, read.gradient_CC)
            )
            loss = 0.0
            for vectors_WR, decoder_WR, state_WW, gradient_WW in zip(
                basis.vectors_PWR.double(), decoder_PWR.double(), *(each.double() for each in moments), strict=True
            ):
                error_WW = torch.eye(len(state_WW), dtype=torch.float64) - vectors_WR @ decoder_WR.mT
                loss += float((error_WW.mT @ state_WW @ error_WW * gradient_WW).sum()) / 2
            found.append(loss)
    return found


@pytest.mark.parametrize("layout", ["joint", "per_head"])
@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_they_lose_least_of_the_estimated_loss(calibration, layout, rate):
    settings = {"rate": rate, "layout": layout, "ranks": "fraction"}
    by_energy = estimated_losses(calibration, config_of(**settings))
    by_loss = estimated_losses(calibration, config_of(weigh_by="loss", **settings))
    assert all(0 < ours <= theirs for ours, theirs in zip(by_loss, by_energy, strict=True))
    assert sum(by_loss) < 0.9 * sum(by_energy)


def test_ranks_of_a_budget_go_where_the_loss_asks(calibration):
    uniform = estimated_losses(calibration, config_of(weigh_by="loss", rate=0.4, ranks="fraction"))
    spread = estimated_losses(calibration, config_of(weigh_by="loss", rate=0.4, ranks="budget"))
    assert sum(spread) < sum(uniform)


@pytest.mark.parametrize("cache_dtype", ["model", "int8"])
@pytest.mark.parametrize("layout", ["joint", "per_head"])
@torch.no_grad()
def test_a_cache_of_them_is_the_dense_model_at_full_rank(calibration, layout, cache_dtype):
    model, ids = tiny_model(), ids_of(2, 60, seed=2)
    expected = model(ids).logits
    settings = {"weigh_by": "loss", "layout": layout, "cache_dtype": cache_dtype, "update_period": 4}
    model = lowrank_kv.compress(model, "static-joint-pf", bases=calibration, rate=1.0, **settings)
    output = model(ids[:, :40])
    first, cache = output.logits, output.past_key_values
    rest = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(40, 60)]
    found = torch.cat([first, *rest], dim=1)
    tolerance = 2e-3 if cache_dtype == "model" else 0.5
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@torch.no_grad()
def test_generation_takes_them_as_any_setting(calibration):
    model = lowrank_kv.compress(tiny_model(), "static-joint-pf", bases=calibration, rate=0.5, weigh_by="loss")
    output = model.generate(ids_of(1, 50), max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    assert output.sequences.shape == (1, 58)
    layer = output.past_key_values.compressed_layers()[0]
    assert layer.config.weigh_by == "loss"


@pytest.mark.parametrize(
    ("preset", "settings", "message"),
    [
        ("ojakv-joint", {}, "`weigh_by` must be energy with `tracker: oja`"),
        ("subspace-a", {}, "`weigh_by` must be energy with `tracker: frequent_directions`"),
        ("adaptive-mixed", {}, "`weigh_by` must be left out with `cache_dtype: mixed`"),
        ("static-pca", {}, "`rope` must be pre with `weigh_by: loss`"),
        ("static-joint-pf", {"key_weight": 2.0}, "`key_weight`"),
        ("static-joint-pf", {"weigh_by": "gradient"}, "`weigh_by` must be one of"),
    ],
)
def test_where_they_are_not_to_be_had_it_is_said(preset, settings, message):
    with pytest.raises(UserError, match=message):
        config_of(preset, **{"weigh_by": "loss", **settings})


def test_a_calibration_must_know_the_loss():
    plain = Calibration.from_text(tiny_model(), ids_of(2, 160), progress=False, self_check=False)
    with pytest.raises(UserError, match="knows no loss; leave `weigh_by` out, or .* `read_gradients: true`"):
        make_plan(plain, config_of(weigh_by="loss"))
    with pytest.raises(UserError, match="calibrate .* --read_gradients true` once"):
        lowrank_kv.compress(tiny_model(), "static-joint-pf", weigh_by="loss")
    by_energy = Calibration.from_text(tiny_model(), ids_of(2, 160), read_energy=True, **SETTINGS)
    with pytest.raises(UserError, match="knows no loss"):
        make_plan(by_energy, config_of(weigh_by="loss"))
