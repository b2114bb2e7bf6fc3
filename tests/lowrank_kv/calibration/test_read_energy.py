"""Plans of bits for a model whose backward pass does not fit: energy stands for the loss's gradients."""

import json

import pytest
import torch
from methods import tiny_model

import lowrank_kv
from lowrank_kv.calibration.bit_plans import coded_model
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.calibration.energy_weights import relative_weights
from lowrank_kv.utils.errors import UserError

SETTINGS = {"joint_layers": 3, "progress": False, "self_check": False}


def ids_of(blocks: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 97, (blocks, length), generator=torch.Generator().manual_seed(seed))


def read(**settings) -> Calibration:
    return Calibration.from_text(tiny_model(), ids_of(4, 160), **SETTINGS, **settings)


@pytest.fixture(scope="module")
def by_energy():
    return read(read_energy=True)


@pytest.fixture(scope="module")
def by_gradients():
    return read(read_gradients=True)


def test_it_reads_the_states_that_gradients_are_taken_of(by_energy, by_gradients):
    """The same tokens, those that some later one reads compressed; of rows of several layers, too."""
    for index, sides in by_gradients.read_states().items():
        for side, expected in sides.items():
            found = by_energy.read_states()[index][side]
            torch.testing.assert_close(found.state_CC, expected.state_CC)
            torch.testing.assert_close(found.sample_NC, expected.sample_NC, atol=2e-2, rtol=2e-2)


def test_it_asks_for_each_part_of_a_row_alike(by_energy):
    width = by_energy.geometry.width
    for sides in by_energy.read_states().values():
        for states in sides.values():
            expected_C = relative_weights(states.state_CC, width)
            assert torch.equal(states.gradient_CC, states.gradient_CC.diagonal().diag())
            torch.testing.assert_close(states.gradient_CC.diagonal(), expected_C)
            # What the squared error of leaving a part out comes to: the whole of its energy, 1.
            parts_P = (expected_C * states.state_CC.diagonal()).unflatten(0, (-1, width)).sum(1)
            torch.testing.assert_close(parts_P, torch.ones_like(parts_P))


def test_no_graph_is_kept_and_no_gradient_taken(monkeypatch):
    model = tiny_model()

    def refused(*_, **__):
        raise AssertionError("a backward pass")

    monkeypatch.setattr(torch.autograd, "grad", refused)
    monkeypatch.setattr(torch.Tensor, "backward", refused)
    Calibration.from_text(model, ids_of(2, 160), read_energy=True, **SETTINGS)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("joint_layers", [0, 3])
def test_larger_tokens_are_coded_more_finely(by_energy, joint_layers):
    """The gate foretells what a token costs, which by energy is its size in the coefficients that are kept."""
    coded = coded_model(by_energy, 0.3, token_classes=4, joint_layers=joint_layers)
    assert coded.loss_per_rate is None
    for sides in coded.layers.values():
        for side in sides.values():
            taken = [plan.row_bytes(plan.num_coefficients) for plan in side.plan.plans]
            assert taken == sorted(taken)
            assert taken[0] < taken[-1]


@pytest.mark.parametrize("preset", ["static-mixed", "tokenwise-mixed", "adaptive-mixed", "joint-mixed"])
@torch.no_grad()
def test_every_preset_of_bits_is_served_from_a_saved_one(by_energy, preset, tmp_path):
    by_energy.save(tmp_path / "bases", model="tiny", text=["random"])
    config = json.loads((tmp_path / "bases/config.json").read_text())
    assert config["by_energy"] is True
    model = lowrank_kv.compress(tiny_model(), preset, rate=0.3, bases=tmp_path / "bases")
    stock, ids = tiny_model(), ids_of(1, 200, seed=1)
    cache = model(ids[:, :160]).past_key_values
    assert cache.rate < 0.75
    found = model(ids[:, 160:], past_key_values=cache).logits.log_softmax(-1)
    expected = stock(ids).logits[:, 160:].log_softmax(-1)
    divergence = float((expected.exp() * (expected - found)).sum(-1).mean())
    assert 0 < divergence < 0.05


def test_the_default_preset_takes_it(by_energy):
    model = lowrank_kv.compress(tiny_model(), by_energy)
    assert model(ids_of(1, 8)).past_key_values.compressed_layers()[0].config.own_directions == 4


def test_gates_of_other_bases_are_refused(by_gradients, tmp_path):
    """Their coefficients are not those of the bases made here: classes of tokens would silently be others."""
    by_gradients.save(tmp_path / "bases", model="tiny", text=["random"])
    config = tmp_path / "bases" / "config.json"
    values = json.loads(config.read_text())
    for other in ({}, {"damping": None}, {"damping": 0.3}):
        config.write_text(json.dumps({key: value for key, value in values.items() if key != "damping"} | other))
        with pytest.raises(UserError, match=r"in whose bases its gates tell classes.*here 0.1.*; calibrate again"):
            Calibration.load(tmp_path / "bases")


def test_an_older_file_is_of_gradients(by_gradients, tmp_path):
    by_gradients.save(tmp_path / "bases", model="tiny", text=["random"])
    config = tmp_path / "bases/config.json"
    values = json.loads(config.read_text())
    assert values.pop("by_energy") is False
    config.write_text(json.dumps(values))
    assert not Calibration.load(tmp_path / "bases").by_energy
    config.write_text(json.dumps(values | {"by_energy": "yes"}))
    with pytest.raises(UserError, match="by_energy"):
        Calibration.load(tmp_path / "bases")


def test_reads_are_weighed_in_one_way():
    with pytest.raises(UserError, match="`read_energy` must be left out beside `read_gradients`"):
        read(read_gradients=True, read_energy=True)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_files_do_not_depend_on_torchs_default_dtype(default, tmp_path):
    """Of wide rows a gate counts more coefficients than bf16 can tell apart: it was rounded in the file."""
    model = tiny_model(num_hidden_layers=6)
    calibration = Calibration.from_text(model, ids_of(2, 160), read_energy=True, **(SETTINGS | {"joint_layers": 6}))
    states = calibration.read_states()[5]["key_value"]
    object.__setattr__(states.fit.gate, "leading", 381)
    saved = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        calibration.save(tmp_path / "bases", model="tiny", text=["random"])
        loaded = Calibration.load(tmp_path / "bases").read_states()[5]["key_value"]
    finally:
        torch.set_default_dtype(saved)
    assert loaded.fit.gate.leading == 381
    assert torch.equal(loaded.state_CC, states.state_CC)


def test_files_do_not_depend_on_torchs_default_device(by_gradients, tmp_path):
    """Moments of rows of several layers were zero after it."""
    with torch.device("meta"):
        by_gradients.save(tmp_path / "bases", model="tiny", text=["random"])
        loaded = Calibration.load(tmp_path / "bases").read_states()
    for index, sides in by_gradients.read_states().items():
        for side, states in sides.items():
            assert torch.equal(loaded[index][side].state_CC, states.state_CC)
            assert loaded[index][side].fit.gate.leading == states.fit.gate.leading
