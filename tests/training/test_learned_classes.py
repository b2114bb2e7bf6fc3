"""Classes of tokens that training learns: the price that holds the rate, runs that go on, and what is written."""

import json
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from methods import planned_model, tiny_model
from safetensors.torch import load_file
from training_runs import EXACT, PLANNED, merged, summary, train_here

import dynakv
from dynakv.checkpoint_files import read_state
from dynakv.objective import RateRecorder, objective
from dynakv.training_config import TrainConfig
from lowrank_kv.calibration.bit_plans import coded_model
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.loading import load_model
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from training.class_shares import calibrate_bounds
from training.data import Batch
from training.distillation import summed_kl, teacher_logits

LEARNED = merged(PLANNED, {"compressor": {"learned_classes": True}})
UNMOVED = {"rate": {"calibrate_threshold": False}}
TARGET = PLANNED["rate"]["target_retain_rate"]


def test_classes_learn_beside_the_projection():
    model = tiny_model()
    planned_model(model, 0.15, token_classes=4, learned_classes=True)
    dynakv.set_exact_tokens(model, EXACT)
    model.train()
    batch = Batch.from_ids(torch.randint(1, 97, (2, 60), generator=torch.Generator().manual_seed(0)), None)
    with RateRecorder(model) as recorder:
        logits = model(**batch.inputs, use_cache=False).logits
    kl = summed_kl(logits, teacher_logits(model, batch.inputs), batch.targets)
    objective(kl, recorder.rates(), 1.0).backward()
    for side in dynakv.token_compressors(model):
        gradients = {name: parameter.grad for name, parameter in side.named_parameters()}
        assert set(gradients) == {f"gate.{name}" for name in ("linear", "square", "rest", "bounds")} | {
            "projection.weight"
        }
        assert all(gradient.abs().sum() > 0 for gradient in gradients.values())


def test_the_price_holds_the_rate(training_values, tmp_path):
    """Steps as large as these move tokens into dearer classes where those are fixed."""
    train_here(training_values, tmp_path / "fixed", **PLANNED)
    checkpoint = train_here(training_values, tmp_path / "learned", **merged(LEARNED, UNMOVED))
    rates = {name: summary(tmp_path / name)["measured_classes"]["hard_rate"] for name in ("fixed", "learned")}
    assert rates["learned"] == pytest.approx(TARGET, rel=0.06)
    assert abs(rates["learned"] - TARGET) < abs(rates["fixed"] - TARGET)
    assert summary(tmp_path / "learned")["alpha"] > 0
    assert json.loads((checkpoint / "config.json").read_text())["compressor"]["learned_classes"]


def test_bounds_move_by_one_number_to_the_rate_that_was_asked_for(training_values, tmp_path):
    """The price is held where the rate ends too high."""
    high = merged(LEARNED, {"rate": {"gain": 0.0, "alpha": 1e-6}, "optimizer": {"lr_gate": 0.02}})
    moved = train_here(training_values, tmp_path / "moved", **high)
    unmoved = train_here(training_values, tmp_path / "unmoved", **merged(high, UNMOVED))
    rates = {name: summary(tmp_path / name)["measured_classes"]["hard_rate"] for name in ("moved", "unmoved")}
    assert rates["unmoved"] > 1.1 * TARGET
    assert rates["moved"] == pytest.approx(TARGET, rel=0.01)
    by = summary(tmp_path / "moved")["measured_classes"]["bounds_moved"]
    assert by > 0
    before, after = (read_state(each / "compressor.safetensors") for each in (unmoved, moved))
    for name in (name for name in before if name.endswith(".bounds")):
        torch.testing.assert_close(after[name], before[name] + by, rtol=1e-5, atol=1e-5)


def test_a_target_that_no_bounds_reach_is_said(training_values, tmp_path):
    model = tiny_model()
    planned_model(model, 0.15, token_classes=4, learned_classes=True)
    batches = [Batch.from_ids(torch.randint(1, 97, (2, 60), generator=torch.Generator().manual_seed(0)), None)]
    engine = SimpleNamespace(model=model, compressor_parameters=tuple, gather_full=lambda *_, **__: nullcontext())
    for target in (0.9, 0.001):
        with pytest.warns(UserWarning, match=f"tokens of a text take .*, for a target of {target}: no bounds"):
            found = calibrate_bounds(engine, batches, target, "a text")
        assert (found["bounds_moved"] < 0) == (target == 0.9)


def test_the_price_starts_at_what_the_calibration_says(training_values, tmp_path):
    """Too high a price takes bytes away that come back late, or never: short runs end before."""
    ids_NT = torch.randint(1, 257, (4, 64), generator=torch.Generator().manual_seed(0))
    model = load_model(training_values["model"], dtype="float32")
    calibration = Calibration.from_text(model, ids_NT, read_gradients=True, progress=False)
    calibration.save(tmp_path / "bases", model=training_values["model"], text=["random"])

    def first_price(name: str, **changes: dict[str, float]) -> float:
        one_step = {"optimizer": {"steps": 1}, "calibration": {"bases": str(tmp_path / "bases")}}
        train_here(training_values, tmp_path / name, **merged(merged(LEARNED, one_step), changes))
        return json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])["alpha"]

    # One byte more is then worth as much to the loss as it adds to α R².
    coded = coded_model(calibration, TARGET, token_classes=4)
    price = first_price("it")
    assert price == pytest.approx(coded.loss_per_rate / (2 * TARGET), rel=1e-3)
    assert first_price("twice as many bytes", rate={"target_retain_rate": 2 * TARGET}) < price
    assert first_price("weighed", loss={"distillation": 2}) == pytest.approx(2 * price, rel=1e-6)
    assert first_price("asked for", rate={"alpha": 0.5}) == 0.5


def test_a_start_that_does_not_say_a_price_is_refused_without_one(training_values, tmp_path):
    fixed = str(train_here(training_values, tmp_path / "fixed", **merged(PLANNED, {"optimizer": {"steps": 1}})))
    changes = merged(LEARNED, {"initial_checkpoint": fixed, "optimizer": {"steps": 1}})
    with pytest.raises(
        UserError, match="`rate.alpha` must be given, for `initial_checkpoint` was trained without a price"
    ):
        train_here(training_values, tmp_path / "run", **changes)
    train_here(training_values, tmp_path / "given", **merged(changes, {"rate": {"alpha": 0.5}}))
    assert json.loads((tmp_path / "given/metrics.jsonl").read_text().splitlines()[0])["alpha"] == 0.5
    model = load_model(training_values["model"], dtype="float32")
    ids_NT = torch.randint(1, 257, (4, 64), generator=torch.Generator().manual_seed(0))
    calibration = Calibration.from_text(model, ids_NT, read_energy=True, progress=False)
    calibration.save(tmp_path / "bases", model=training_values["model"], text=["random"])
    changes = merged(LEARNED, {"calibration": {"bases": str(tmp_path / "bases")}})
    with pytest.raises(
        UserError, match="`rate.alpha` must be given, for `calibration.bases` were read without gradients"
    ):
        train_here(training_values, tmp_path / "energy", **changes)


def test_a_run_that_goes_on_is_the_same_run(training_values, tmp_path):
    changes = merged(LEARNED, {"checkpoint_every": 3, "optimizer": {"steps": 6}})
    checkpoint = train_here(training_values, tmp_path / "run", **changes)
    shutil.rmtree(tmp_path / "run/states/step-000006")
    checkpoint.rename(tmp_path / "uninterrupted")
    train_here(training_values, tmp_path / "run", resume=True, **changes)
    uninterrupted, resumed = (
        load_file(directory / "compressor.safetensors") for directory in (tmp_path / "uninterrupted", checkpoint)
    )
    for name, tensor in uninterrupted.items():
        assert torch.equal(tensor, resumed[name]), name


@pytest.mark.parametrize("joint_layers", [0, 2])
def test_recomputed_activations_train_the_same_compressor(training_values, tmp_path, joint_layers):
    """With all that a run does by default, and where a pass reads what an earlier one left."""
    values = {
        **training_values,
        "compressor": {"joint_layers": joint_layers},
        "rate": {"calibrate_threshold_tokens": 128},
    }
    changes = {"calibration": {"start": None, "tokens": 640}, "optimizer": {"steps": 2}}
    kept, recomputed = (
        load_file(
            train_here(values, tmp_path / f"recomputed-{on}", gradient_checkpointing=on, **changes)
            / "compressor.safetensors"
        )
        for on in (False, True)
    )
    for name, tensor in kept.items():
        assert torch.equal(tensor, recomputed[name]), name


@torch.no_grad()
def test_a_checkpoint_is_served_as_it_was_trained(tmp_path):
    model = tiny_model()
    make_cache = planned_model(model, 0.2, token_classes=4, learned_classes=True)
    for side in dynakv.token_compressors(model):
        side.gate.bounds += 0.3
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = model(ids, past_key_values=make_cache()).logits
    dynakv.save_compressor(model, tmp_path / "c")
    assert torch.equal(dynakv.attach(tiny_model(), tmp_path / "c")(ids).logits, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rank_policy": "gate", "exact_tokens": {}},
            "`compressor.learned_classes` must be false, or with `rank_policy: plan`",
        ),
        ({"token_classes": 1}, "`compressor.learned_classes` must be false, or .* two or more `token_classes`"),
    ],
)
def test_what_has_no_classes_cannot_learn_them(changes, message):
    values = {"model": "m", "dataset": {"name": ["t"]}, **LEARNED}
    values["compressor"] = {**values["compressor"], **changes}
    with pytest.raises(UserError, match=message):
        build(TrainConfig, values)


def test_classes_are_not_learned_by_an_override():
    config = dynakv.DynaKVConfig(rank_policy="plan")
    with pytest.raises(
        UserError, match="`learned_classes` cannot be overridden with True: it is what training learned"
    ):
        config.overridden(learned_classes=True)


def test_settings_of_the_price_are_for_learned_classes():
    values = {"model": "m", "dataset": {"name": ["t"]}, **merged(LEARNED, {"rate": {"alpha": 2.0}})}
    config = build(TrainConfig, values)
    assert (config.gain, config.lr_gate) == (6 / TARGET, 1e-3)
