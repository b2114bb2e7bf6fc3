"""STAR-KV's recipe in the training loop: thresholds fall to the target, and what they learned is served."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from training_runs import STILL, losses, merged, rows, summary, train_here

import dynakv
from dynakv.training_config import TrainConfig
from lowrank_kv.hf.loading import load_model, load_tokenizer
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from training.data_sources import heldout_blocks
from training.validation import measure

ROOT = Path(__file__).parents[2]
TARGET = 0.4
THRESHOLDS = {
    "compressor": {"rank_policy": "soft_threshold", "decoder": "decoupled"},
    "loss": {"cross_entropy": 0, "distillation": 1},
    "rate": {"target_retain_rate": TARGET},
    "optimizer": {"steps": 100, "lr_gate_bias": 0.3, "lr_projection": 3e-3},
    "checkpoint_every": 0,
    "heldout_blocks": 2,
}


@pytest.fixture(scope="module")
def trained(training_values, tmp_path_factory) -> Path:
    """The directory of a run."""
    output = tmp_path_factory.mktemp("thresholds") / "run"
    train_here(merged(training_values, THRESHOLDS), output)
    return output


def served(trained: Path, training_values: dict):
    return dynakv.attach(load_model(training_values["model"]), trained / "checkpoint", self_check=False)


def test_the_price_moves_thresholds_to_the_target_and_ranks_are_fixed_there(trained, training_values):
    found = rows(trained)
    rates, soft = ([row[key] for row in found] for key in ("hard_rate", "soft_rate"))
    assert rates[0] == 1
    assert rates[49] == pytest.approx(TARGET, abs=0.12)
    assert soft[49] < rates[49] - 0.05, "shrunk"
    assert set(rates[50:]) == {rates[-1]}
    assert rates[-1] == pytest.approx(TARGET, abs=0.03)
    assert rates[50:] == pytest.approx(soft[50:])
    served_rates = [side.gate.rate for side in dynakv.token_compressors(served(trained, training_values))]
    assert sum(served_rates) / len(served_rates) == pytest.approx(rates[-1])
    assert len(set(served_rates)) > 1, "each layer's keys and values have their own"


def test_the_end_is_served_as_it_was_trained(trained, training_values):
    model = served(trained, training_values)
    ids = torch.randint(1, 257, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.train()(ids, use_cache=False).logits
        found = model.eval()(ids)
    torch.testing.assert_close(found.logits, expected, atol=2e-4, rtol=0)
    [heldout] = summary(trained)["heldout"].values()
    keys, values = heldout["layer_rates"]["keys"], heldout["layer_rates"]["values"]
    rates = [side.gate.rate for side in dynakv.token_compressors(model)]
    assert [*keys, *values] == pytest.approx([*rates[0::2], *rates[1::2]], abs=1e-4)
    assert heldout["hard_rate"] < found.past_key_values.rate < heldout["hard_rate"] + 0.1  # and places of rows


def test_training_beats_the_untrained_decomposition_at_the_same_ranks(trained, training_values):
    """Its own ablation: the same ranks of each layer's keys and values in the PCA that it started from."""
    config = build(TrainConfig, {**merged(training_values, THRESHOLDS), "output": "unused"})
    [batches] = heldout_blocks(config, load_tokenizer(training_values["model"])).values()
    model = served(trained, training_values)
    learned = measure(model, batches)
    untrained = train_here(
        merged(training_values, THRESHOLDS), trained.parent / "untrained", **merged(STILL, {"optimizer": {"steps": 1}})
    )
    start = dynakv.attach(load_model(training_values["model"]), untrained, self_check=False)
    for side, other in zip(dynakv.token_compressors(start), dynakv.token_compressors(model), strict=True):
        side.gate.fix(int(other.gate.rank))
    plain = measure(start, batches)
    assert plain["hard_rate"] == pytest.approx(learned["hard_rate"])
    assert learned["kl"] < 0.9 * plain["kl"]


def test_a_run_goes_on_from_a_state_as_it_was(training_values, tmp_path):
    values = merged(training_values, THRESHOLDS)
    train_here(values, tmp_path / "whole", optimizer={"steps": 6})
    train_here(values, tmp_path / "run", optimizer={"steps": 6}, checkpoint_every=3)
    shutil.rmtree(tmp_path / "run/checkpoint")
    shutil.rmtree(tmp_path / "run/states/step-000006")
    train_here(values, tmp_path / "run", optimizer={"steps": 6}, checkpoint_every=3, resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_ranks_that_are_fixed_stay_so_where_a_run_resumes_with_more_steps(training_values, tmp_path, recwarn):
    """Of six steps the last three have fixed ranks, and of thirty the first fifteen would have thresholds that learn."""
    values = merged(training_values, {**THRESHOLDS, "checkpoint_every": 2, "keep_checkpoints": 20})
    output, more = tmp_path / "run", {"optimizer": {"steps": 30}}
    train_here(values, output, optimizer={"steps": 6})
    [rate] = {row["hard_rate"] for row in rows(output)[3:]}
    train_here(values, output, resume=True, **more)
    assert {row["hard_rate"] for row in rows(output)[3:]} == {rate}
    assert summary(output)["heldout"]["text.jsonl"]["hard_rate"] == pytest.approx(rate, abs=1e-4)
    told = "`optimizer.steps` was 6 and is 30: the run has fixed its ranks already, which stay as they are"
    assert sum(told in str(each.message) for each in recwarn) == 1
    for step in range(10, 31, 2):
        shutil.rmtree(output / f"states/step-{step:06d}")
    with pytest.raises(UserError, match="its ranks were fixed for 0.4, and now it is 0.3"):
        train_here(values, output, resume=True, **more, rate={"target_retain_rate": 0.3})


def test_a_run_trains_on_from_its_thresholds(trained, training_values, tmp_path):
    values = merged(training_values, THRESHOLDS)
    train_here(values, tmp_path / "on", initial_checkpoint=str(trained / "checkpoint"), optimizer={"steps": 2})
    first, last = rows(tmp_path / "on")[0], rows(trained)[-1]
    assert first["hard_rate"] == pytest.approx(last["hard_rate"], abs=0.12)  # without the factor that closed the rest
    assert first["alpha"] == pytest.approx(summary(trained)["alpha"])


def test_star_kv_is_a_preset_of_the_same_loop(here, four_steps, tmp_path):
    preset = yaml.safe_load((ROOT / "configs/star-kv.yaml").read_text())
    own = yaml.safe_load(four_steps.read_text())
    sections = {key: {**own.get(key, {}), **preset[key]} for key in ("compressor", "loss", "rate")}
    four_steps.write_text(yaml.safe_dump({**own, **sections}))
    here("train_dynakv.py", "--config", four_steps)
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    for row in found:
        assert row["loss"] == pytest.approx(row["kl"] + row["alpha"] * row["soft_rate"] ** 2, rel=1e-4)
        assert row["alpha"] > 0
    [heldout] = summary(tmp_path / "run")["heldout"].values()
    assert heldout["hard_rate"] == found[-1]["hard_rate"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": {"target_retain_rate": None}}, "`rate.target_retain_rate` must be given where .* is soft_threshold"),
        ({"rate": {"alpha": 0.0}}, "`rate.alpha` must be positive when there is a target"),
        ({"rate": {"target_retain_rate": 0.02}}, "`rate.target_retain_rate` must be at least 0.125"),
        ({"rate": {"fix_ranks_from": 2.0}}, "`rate.fix_ranks_from` must be between 0 and 1; got 2"),
        ({"compressor": {"mask": "straight_through"}}, "`compressor.mask` must be `hard`"),
        (
            {"calibration": {"start": "gradient"}},
            "`compressor.rank_policy` must be another, or `calibration.start: pca`",
        ),
    ],
)
def test_mistakes_are_named_before_anything_runs(training_values, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train_here(merged(training_values, THRESHOLDS), tmp_path / "run", **changes)
    assert not (tmp_path / "run/metrics.jsonl").exists()
