"""A run that ends with the step whose compressor is nearest on held-out text."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from training_runs import PLANNED, launch, losses, merged, rows, summary, train_here
from transformers import AutoModelForCausalLM, AutoTokenizer

import dynakv
from dynakv.training_config import TrainConfig
from lowrank_kv.utils.config import build, to_dict
from lowrank_kv.utils.errors import UserError
from training.best_step import measure_if_due
from training.data_sources import heldout_blocks
from training.resumable_state import add_to_progress, read_progress
from training.selection import Selection
from training.validation import measure

WEIGHTS = "checkpoint/compressor.safetensors"
# Learning rates that rise until what the plan knew is lost.
SELECTED = merged(
    PLANNED,
    {
        "checkpoint_every": 2,
        "heldout_every": 2,
        "calibration": {"tokens": 512},
        "rate": {"calibrate_threshold_tokens": 128},
        "optimizer": {"steps": 8, "lr_projection": 0.2, "warmup_ratio": 1},
    },
)
GATES = {
    "checkpoint_every": 2,
    "heldout_every": 2,
    "rate": {"target_retain_rate": 0.5, "calibrate_threshold_tokens": 128},
    "optimizer": {"steps": 8},
}
NESTED = {"compressor": {"rank_policy": "nested", "decoder": "orthogonal"}}


def config_of(values: dict, **changes) -> TrainConfig:
    return build(TrainConfig, merged({**values, "output": "unused"}, changes))


def steps_only(output) -> list[dict]:
    return [row for row in rows(output) if "heldout" not in row]


def measured_rows(output) -> list[dict]:
    return [row for row in rows(output) if "heldout" in row]


def same_training(output, reference) -> None:
    assert [row["loss"] for row in steps_only(output)] == [row["loss"] for row in steps_only(reference)]


def measured_anew(values: dict, checkpoint, **changes) -> dict:
    config = config_of(values, **changes)
    model = dynakv.attach(AutoModelForCausalLM.from_pretrained(values["model"]), checkpoint)
    dynakv.set_exact_tokens(model, config.compressor.seen_exactly)
    batches = heldout_blocks(config, AutoTokenizer.from_pretrained(values["model"]))["text.jsonl"]
    return measure(model.eval(), batches)


@pytest.fixture(scope="module")
def selected(training_values, tmp_path_factory):
    """A run whose later steps are worse than its first ones."""
    output = tmp_path_factory.mktemp("selected") / "run"
    train_here(training_values, output, **SELECTED)
    return output


def test_the_best_step_is_what_a_run_ends_with(training_values, selected):
    found = summary(selected)
    kls = {entry["step"]: entry["kl"] for entry in found["heldout_by_step"]}
    assert list(kls) == [2, 4, 6, 8]
    best = min(kls, key=kls.get)
    assert found["selected_step"] == best < 8, "the run gets worse"
    assert kls[8] > 1.5 * kls[best]
    state = load_file(selected / f"states/step-{best:06d}/compressor.safetensors")
    final = load_file(selected / WEIGHTS)
    assert all(torch.equal(tensor, state[name]) for name, tensor in final.items() if "shares" not in name)
    assert found["heldout"]["text.jsonl"]["kl"] == kls[best]
    assert measured_anew(training_values, selected / "checkpoint", **SELECTED) == found["heldout"]["text.jsonl"]
    assert f"1,024 in 8 steps; this is what step {best} left" in (selected / "checkpoint/README.md").read_text()


def test_states_of_the_best_step_stay(selected):
    best = summary(selected)["selected_step"]
    kept = {path.name for path in (selected / "states").iterdir()}
    assert kept == {f"step-{step:06d}" for step in (best, 6, 8)}
    assert read_progress(selected / "states/step-000008")["heldout_by_step"] == summary(selected)["heldout_by_step"]


def test_what_is_measured_stands_in_the_metrics_and_in_tensorboard(selected):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    entries = summary(selected)["heldout_by_step"]
    assert measured_rows(selected) == [
        {"step": each["step"], "heldout_kl": each["kl"], "heldout_rate": each["rate"], "heldout": each["texts"]}
        for each in entries
    ]
    shown = EventAccumulator(str(selected / "tensorboard")).Reload().Scalars("selection, mean/kl")
    assert [(point.step, point.value) for point in shown] == [
        (each["step"], pytest.approx(each["kl"])) for each in entries
    ]


@pytest.mark.parametrize("kind", ["plan", "gates", "nested", "thresholds", "learned", "streamed"])
def test_measuring_changes_nothing_of_training(training_values, selected, tmp_path, kind):
    thresholds = {"compressor": {"rank_policy": "soft_threshold"}}
    streamed = {"dataset": {"streaming": True, "shuffle_buffer": 8, "divided_by": "documents"}}
    changes = {
        "plan": SELECTED,
        "gates": GATES,
        "nested": merged(GATES, NESTED),
        "thresholds": merged(GATES, thresholds),
        "learned": merged(SELECTED, {"compressor": {"learned_classes": True}}),
        "streamed": merged(SELECTED, streamed),
    }[kind]
    runs = [tmp_path / name for name in ("with", "without")]
    train_here(training_values, runs[0], **changes)
    train_here(training_values, runs[1], **{**changes, "heldout_every": 0})
    assert len(measured_rows(runs[0])) == 4
    same_training(*runs)
    states = [run / "states/step-000008" for run in runs]
    for name in ("compressor.safetensors", "optimizer.safetensors"):
        assert (states[0] / name).read_bytes() == (states[1] / name).read_bytes()
    progress = [read_progress(state) for state in states]
    assert progress[0]["places"] == progress[1]["places"]
    assert progress[0].keys() - progress[1].keys() == {"heldout_by_step"}
    found = [summary(run) for run in runs]
    assert found[0].keys() - found[1].keys() == {"selected_step", "heldout_by_step"}
    assert found[0]["heldout_by_step"][-1]["texts"]["text.jsonl"]["kl"] == found[1]["heldout"]["text.jsonl"]["kl"]


@pytest.mark.parametrize("stopped", ["behind a state", "behind a measurement"])
def test_a_resumed_run_selects_as_the_uninterrupted_one(training_values, selected, tmp_path, stopped, monkeypatch):
    output = tmp_path / "run"

    def stop(engine, run, *arguments):
        if run.step < 4 or stopped == "behind a measurement":
            measure_if_due(engine, run, *arguments)
        if run.step == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("training.loop.measure_if_due", stop)
    with pytest.raises(KeyboardInterrupt):
        train_here(training_values, output, **SELECTED)
    monkeypatch.undo()
    train_here(training_values, output, resume=True, **SELECTED)
    same_training(output, selected)
    assert measured_rows(output) == measured_rows(selected)
    assert (output / WEIGHTS).read_bytes() == (selected / WEIGHTS).read_bytes()
    assert summary(output)["heldout_by_step"] == summary(selected)["heldout_by_step"]


def test_a_run_that_is_over_selects_what_its_states_measured(training_values, selected, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(selected, output)
    shutil.rmtree(output / "checkpoint")
    train_here(training_values, output, resume=True, **SELECTED)
    assert (output / WEIGHTS).read_bytes() == (selected / WEIGHTS).read_bytes()
    assert measured_rows(output) == measured_rows(selected)


def test_a_lost_best_step_is_told_and_the_last_can_be_had(training_values, selected, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(selected, output)
    shutil.rmtree(output / "checkpoint")
    best = summary(selected)["selected_step"]
    shutil.rmtree(output / f"states/step-{best:06d}")
    with pytest.raises(UserError, match=rf"step {best} was the best .* its state is lost: .*`--heldout_every 0`"):
        train_here(training_values, output, resume=True, **SELECTED)
    train_here(training_values, output, resume=True, **{**SELECTED, "heldout_every": 0})
    found = summary(output)
    assert "selected_step" not in found
    assert found["heldout"]["text.jsonl"]["kl"] == summary(selected)["heldout_by_step"][-1]["kl"]


def test_what_was_measured_on_other_text_is_forgotten(training_values, selected):
    config = config_of(training_values, **SELECTED)
    progress = read_progress(selected / "states/step-000008")
    text = progress["heldout_by_step"][0]["text"]
    assert len(Selection.resumed(config, text, progress, main=True).measured) == 4
    changed = config_of(training_values, **merged(SELECTED, {"heldout_blocks": 2}))
    with pytest.warns(UserWarning, match="`heldout_blocks` is another than before: .* set it back"):
        assert not Selection.resumed(changed, text, progress, main=True).measured
    assert not Selection.resumed(changed, text, progress, main=False).measured
    off = config_of(training_values, **{**SELECTED, "heldout_every": 0})
    assert not Selection.resumed(off, text, progress, main=True).measured
    assert not Selection.resumed(config, text, {"step": 2, "config": to_dict(off)}, main=True).measured


def test_a_file_that_is_another_under_its_name_is_other_text(training_values, text_file, tmp_path):
    heldout = shutil.copy(text_file, tmp_path / "held.jsonl")
    changes = {**SELECTED, "dataset": {"heldout": str(heldout)}}
    train_here(training_values, tmp_path / "run", **changes)
    measured = summary(tmp_path / "run")["heldout_by_step"]
    shutil.rmtree(tmp_path / "run/checkpoint")
    lines = heldout.read_text().splitlines(keepends=True)
    heldout.write_text("".join(lines[1:]))
    later = merged(changes, {"optimizer": {"steps": 10}})
    with pytest.warns(UserWarning, match="the held-out text is another than before: .* step 8 cannot be compared"):
        train_here(training_values, tmp_path / "run", resume=True, **later)
    found = summary(tmp_path / "run")["heldout_by_step"]
    assert [each["step"] for each in found] == [8, 10]
    assert found[0]["text"] == found[1]["text"] != measured[0]["text"] == measured[-1]["text"]


def test_a_mean_takes_no_state_of_long_ago(training_values, tmp_path, capfd):
    """As a run's folder may hold the best step's."""
    train_here(training_values, tmp_path / "run", **{**SELECTED, "keep_checkpoints": 4})
    shutil.rmtree(tmp_path / "run/checkpoint")
    shutil.rmtree(tmp_path / "run/states/step-000004")
    changes = {**SELECTED, "heldout_every": 0, "average_checkpoints": 3, "keep_checkpoints": 4}
    train_here(training_values, tmp_path / "run", resume=True, **changes)
    assert summary(tmp_path / "run")["averaged_steps"] == [6, 8]
    assert "`average_checkpoints` is 3, and the mean is of 2" in capfd.readouterr().err


def test_means_of_states_are_measured_and_selected(training_values, tmp_path):
    changes = {**SELECTED, "average_checkpoints": 2}
    train_here(training_values, tmp_path / "run", **changes)
    found = summary(tmp_path / "run")
    entries = found["heldout_by_step"]
    assert [entry["states"] for entry in entries] == [[2, 4], [4, 6], [6, 8]]
    best = next(entry for entry in entries if entry["step"] == found["selected_step"])
    assert best["kl"] == min(entry["kl"] for entry in entries) == found["heldout"]["text.jsonl"]["kl"]
    assert found["averaged_steps"] == best["states"] != [6, 8]
    one, other = best["states"]
    assert f"this is the mean of what steps {one}, {other} left" in (tmp_path / "run/checkpoint/README.md").read_text()
    final = load_file(tmp_path / "run" / WEIGHTS)
    states = [load_file(tmp_path / f"run/states/step-{step:06d}/compressor.safetensors") for step in best["states"]]
    name = next(name for name in final if "projection" in name)
    torch.testing.assert_close(final[name], torch.stack([state[name] for state in states]).mean(dim=0))
    train_here(training_values, tmp_path / "off", **{**changes, "heldout_every": 0})
    same_training(tmp_path / "run", tmp_path / "off")


def test_the_threshold_of_the_best_step_is_calibrated_as_it_was_measured(training_values, tmp_path):
    changes = merged(GATES, {"optimizer": {"lr_projection": 0.01, "warmup_ratio": 0, "min_lr_ratio": 1}})
    train_here(training_values, tmp_path / "run", **changes)
    found = summary(tmp_path / "run")
    best = next(entry for entry in found["heldout_by_step"] if entry["step"] == found["selected_step"])
    assert best["step"] < 8
    assert found["heldout"]["text.jsonl"]["kl"] == best["kl"]
    assert found["calibrated_threshold"]["hard_rate"] == best["rate"]
    state = read_progress(tmp_path / f"run/states/step-{best['step']:06d}")
    assert found["alpha"] == state["controller"]["alpha"]


def entry(step: int, *, kl: float, rate: float) -> dict:
    heldout = {
        "a": {"kl": kl, "perplexity": 2.0, "hard_rate": 0.9},
        "b": {"kl": kl, "perplexity": 2.0, "hard_rate": 0.9},
    }
    return {"step": step, "found": {"heldout": heldout, "calibrated_threshold": {"hard_rate": rate}}}


@pytest.mark.parametrize(
    ("changes", "rates", "best"),
    [
        ({}, [0.9, 0.512, 0.505, 0.495], 3),  # what keeps more is nearer, and is not compared
        ({}, [0.9, 0.6, 0.52, 0.48], None),
        ({"compressor": {"rank_policy": "nested"}}, [0.9, 0.6, 0.5, 0.5], 1),  # nothing learns how much is kept
        ({"rate": {"target_retain_rate": 0.05}}, [0.9, 0.056, 0.054, 0.05], 3),
    ],
)
def test_only_steps_near_the_target_rate_count(training_values, changes, rates, best):
    selection = Selection(config_of(training_values, **merged(GATES, changes)), "text")
    for step, rate in enumerate(rates, 1):
        selection.add(**entry(step, kl=step / 10, rate=rate))
    assert (selection.best and selection.best["step"]) == best
    assert selection.states_kept == ([] if best is None else [best])


def test_divergences_that_are_no_numbers_do_not_count(training_values):
    selection = Selection(config_of(training_values, **GATES), "text")
    for step, kl in enumerate([float("nan"), 0.2, float("inf"), 0.2], 1):
        selection.add(**entry(step, kl=kl, rate=0.5))
    assert selection.best["step"] == 2, "the first of equal ones"


def test_a_run_without_a_step_near_its_rate_ends_with_the_last(training_values, tmp_path):
    far = merged(GATES, {"rate": {"calibrate_threshold": False, "target_retain_rate": 0.2}})
    with pytest.warns(UserWarning, match="`heldout_every` selects nothing: .* 0.2, .* train for longer"):
        train_here(training_values, tmp_path / "run", **far)
    found = summary(tmp_path / "run")
    assert found["selected_step"] == 8
    assert not any(each["is_accepted"] for each in found["heldout_by_step"])
    final = load_file(tmp_path / "run" / WEIGHTS)
    state = load_file(tmp_path / "run/states/step-000008/compressor.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in final.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heldout_every": -1}, "from 0 to `optimizer.steps`, 8; got -1"),
        ({"heldout_every": 10}, "from 0 to `optimizer.steps`, 8; got 10"),
        ({"heldout_every": 3}, "a multiple of `checkpoint_every`, 2, .*; got 3"),
        ({"checkpoint_every": 0}, "0 without `checkpoint_every`"),
        ({"heldout_blocks": 0}, "0 without text to measure: give `dataset.heldout` or `dataset.heldout_share`; got 2"),
        ({"dataset": {"heldout": None}}, "0 without text to measure"),
        ({"rate": {"target_retain_rate": None}}, "0 at a fixed price, .*: give `rate.target_retain_rate`"),
        ({"trainable": "full"}, "0 with `trainable: full`"),
    ],
)
def test_what_cannot_select_is_refused(training_values, changes, message):
    with pytest.raises(UserError, match=f"`heldout_every` must be {message}"):
        config_of(training_values, **merged(GATES, changes))


def test_entries_added_to_a_state_are_checked(selected, tmp_path):
    state = shutil.copytree(selected / "states/step-000008", tmp_path / "state")
    before = read_progress(state)
    add_to_progress(state, {"more": 1})
    assert read_progress(state) == before | {"more": 1}
    (state / "progress.json").write_text(json.dumps({**before, "more": 2}))
    with pytest.raises(UserError, match="checksum"):
        add_to_progress(state, {"more": 3})


@pytest.mark.parametrize("engine", ["ddp", pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def test_several_processes_select_and_train_as_before(training_values, tmp_path, engine):
    if engine != "ddp":
        pytest.importorskip("deepspeed")
    worse = {"steps": 4, "batch_size": 1, "lr_projection": 0.05, "warmup_ratio": 1}
    changes = merged(GATES, {**NESTED, "optimizer": worse})
    output, without = tmp_path / "run", tmp_path / "without"
    launch(engine, 2, training_values, output, **changes)
    launch(engine, 2, training_values, without, **{**changes, "heldout_every": 0})
    same_training(output, without)
    found = summary(output)
    kls = {each["step"]: each["kl"] for each in found["heldout_by_step"]}
    assert found["processes"] == 2
    assert found["selected_step"] == 2
    assert kls[2] == found["heldout"]["text.jsonl"]["kl"] < kls[4]
    assert kls[4] == summary(without)["heldout"]["text.jsonl"]["kl"]
    state, final = load_file(output / "states/step-000002/compressor.safetensors"), load_file(output / WEIGHTS)
    assert all(torch.equal(tensor, state[name]) for name, tensor in final.items() if "projection" in name)


def test_losses_of_a_run_without_selection_have_a_row_for_each_step(training_values, tmp_path):
    train_here(training_values, tmp_path / "run", **{**GATES, "heldout_every": 0})
    assert len(losses(tmp_path / "run")) == 8
    assert "heldout_by_step" not in read_progress(tmp_path / "run/states/step-000008")
