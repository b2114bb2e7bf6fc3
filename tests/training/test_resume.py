"""Runs that end in the middle, of themselves or not, and go on."""

import json
import os
import shutil
import signal
import subprocess
import time
import types

import pytest
import torch
import yaml
from methods import calibration_of
from ready_python import program
from safetensors.torch import save_file
from training_runs import PLANNED, ROOT, SINGLE_THREAD, losses, merged, train_here

from dynakv.training_config import TrainConfig
from lowrank_kv.hf.loading import load_model
from lowrank_kv.utils.config import build, to_dict
from lowrank_kv.utils.errors import UserError
from training.initialization import DEFAULT_PRICE
from training.resumable_state import OPTIMIZER, check_same_run, load_into, saved_states, step_directory
from training.run_state import check_fixed_target

TEXT = {"dataset": {"heldout_share": 0.2, "streaming": True, "shuffle_buffer": 8}}

# Training that says where it is, and stops there for ever.
HANG = """
import os, sys, time, pathlib
def hang():
    pathlib.Path(sys.argv[3] + ".part").write_text(str(os.getpid()))
    os.rename(sys.argv[3] + ".part", sys.argv[3])
    while True:
        time.sleep(600)
{code}
import train_dynakv
train_dynakv.main(sys.argv[1:3])
"""
# In the middle of writing the state of a given step, as on a disk that does not answer.
WRITING = """
import training.resumable_state as state
whole = state.save_file
def half(tensors, path):
    whole(tensors, path)
    if sys.argv[4] in str(path) and path.name == state.OPTIMIZER:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        hang()
state.save_file = half
"""
# When a given step has been taken.
STEPPED = """
import training.loop as loop
whole = loop._step
def step(engine, run, *arguments):
    whole(engine, run, *arguments)
    if run.step == int(sys.argv[4]):
        hang()
loop._step = step
"""


@pytest.fixture(scope="module")
def whole(training_values, tmp_path_factory):
    """An uninterrupted run with a state after every other step."""
    output = tmp_path_factory.mktemp("whole") / "run"
    train_here(training_values, output, checkpoint_every=2, rate={"target_retain_rate": 0.5}, **TEXT)
    return output


def same_as(whole, output):
    assert losses(output) == losses(whole)
    weights = "checkpoint/compressor.safetensors"
    assert (output / weights).read_bytes() == (whole / weights).read_bytes()


def kill_where_it_hangs(training_values, output, tmp_path, *, code, where):
    """A run of this output that gets as far as `where`, as `code` understands it, and is killed there."""
    hanging = tmp_path / "hanging"
    values = merged({**training_values, "output": str(output)}, {"checkpoint_every": 2, **TEXT})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**values, "rate": {"target_retain_rate": 0.5}}))
    command = ["-c", HANG.format(code=code), "--config", str(tmp_path / "c.yaml"), str(hanging), where]
    environment = {**SINGLE_THREAD, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([program(), *command], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        while not hanging.exists():
            assert process.poll() is None, "it ended before"
            time.sleep(0.1)
        os.kill(int(hanging.read_text()), signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()


def test_killed_while_writing_a_state(training_values, whole, tmp_path):
    output = tmp_path / "run"
    kill_where_it_hangs(training_values, output, tmp_path, code=WRITING, where="step-000004")
    left = sorted(path.name for path in (output / "states").iterdir())
    assert left[-1] == "step-000002"
    assert left[0].startswith(".step-000004-partial-"), "it was in the middle of writing"
    train_here(training_values, output, checkpoint_every=2, rate={"target_retain_rate": 0.5}, resume=True, **TEXT)
    same_as(whole, output)
    assert sorted(path.name for path in (output / "states").iterdir()) == ["step-000006", "step-000008"]


def test_killed_while_writing_the_first_state(training_values, whole, tmp_path):
    output = tmp_path / "run"
    kill_where_it_hangs(training_values, output, tmp_path, code=WRITING, where="step-000002")
    changes = {"checkpoint_every": 2, "rate": {"target_retain_rate": 0.5}, **TEXT}
    with pytest.raises(UserError, match="nothing to resume: .* leave out --resume"):
        train_here(training_values, output, resume=True, **changes)
    train_here(training_values, output, **changes)
    same_as(whole, output)


def test_tensorboard_shows_every_step_of_a_resumed_run_once(training_values, whole, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = tmp_path / "run"
    shutil.copytree(whole, output)
    shutil.rmtree(output / "checkpoint")
    shutil.rmtree(output / "states/step-000008")
    train_here(training_values, output, checkpoint_every=2, rate={"target_retain_rate": 0.5}, resume=True, **TEXT)
    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    for name in ("train/loss", "train/tokens_per_second", "train/peak_memory_bytes"):
        assert [event.step for event in events.Scalars(name)] == list(range(1, 9))


def test_states_are_in_order_of_their_steps(tmp_path):
    for step in (1_000_000, 999_998, 200):
        step_directory(tmp_path, step).mkdir()
    assert [path.name for path in saved_states(tmp_path)] == ["step-000200", "step-999998", "step-1000000"]


def test_killed_between_states(training_values, whole, tmp_path):
    output = tmp_path / "run"
    kill_where_it_hangs(training_values, output, tmp_path, code=STEPPED, where="3")
    assert len(losses(output)) == 3, "a step that no state holds"
    assert [path.name for path in saved_states(output / "states")] == ["step-000002"]
    train_here(training_values, output, checkpoint_every=2, rate={"target_retain_rate": 0.5}, resume=True, **TEXT)
    same_as(whole, output)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("optimizer.safetensors", lambda data: data[: len(data) // 2]),
        ("compressor.safetensors", lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]),
        ("progress.json", lambda data: data[:20]),
        ("progress.json", lambda data: data.replace(b'"blocks_per_step": 2', b'"blocks_per_step": 3')),
        ("config.json", None),
    ],
)
def test_a_damaged_state_is_passed_over(training_values, whole, tmp_path, capfd, file, damage):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    shutil.rmtree(output / "checkpoint")
    damaged = output / "states/step-000008" / file
    if damage is None:
        damaged.unlink()
    else:
        damaged.write_bytes(damage(damaged.read_bytes()))
    train_here(training_values, output, checkpoint_every=2, rate={"target_retain_rate": 0.5}, resume=True, **TEXT)
    same_as(whole, output)
    [warning] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert f"{output}/states/step-000008 is damaged and is passed over: {damaged} " in warning


def test_a_damaged_state_does_not_stay_before_what_follows(training_values, whole, tmp_path):
    """It would count among those kept, and as the last good one."""
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    shutil.rmtree(output / "checkpoint")
    (output / "states/step-000008/config.json").unlink()
    rate = {"target_retain_rate": 0.5}
    train_here(training_values, output, checkpoint_every=7, rate=rate, resume=True, **TEXT)
    # The last step has a state of its own again, a whole one.
    assert sorted(path.name for path in (output / "states").iterdir()) == ["step-000007", "step-000008"]
    assert (output / "states/step-000008/config.json").exists()


def test_killed_while_writing_a_row(training_values, whole, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    shutil.rmtree(output / "checkpoint")
    shutil.rmtree(output / "states/step-000008")
    for name in ("metrics.jsonl", "inspections.jsonl"):
        rows = (output / name).read_bytes()
        (output / name).write_bytes(rows[: -len(rows.splitlines()[-1]) // 2])
    train_here(training_values, output, checkpoint_every=2, rate={"target_retain_rate": 0.5}, resume=True, **TEXT)
    same_as(whole, output)


def test_a_run_cannot_be_shortened_below_what_it_has_done(training_values, whole, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    with pytest.raises(UserError, match="`optimizer.steps` is 5, and the resumed run has done 8 steps"):
        train_here(training_values, output, resume=True, optimizer={"steps": 5}, **TEXT)
    assert (output / "checkpoint").exists()


def test_moments_of_other_parameters_are_refused(tmp_path):
    save_file({"there.exp_avg": torch.zeros(1)}, tmp_path / OPTIMIZER)
    message = r"missing \['here.exp_avg', 'here.exp_avg_sq'\], unexpected \['there.exp_avg'\]; go on with the version"
    with pytest.raises(UserError, match=message):
        load_into(types.SimpleNamespace(parameters={"here": None}), tmp_path, 1)


def test_when_all_are_damaged_there_is_nothing_to_resume(training_values, whole, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    for state in (output / "states").iterdir():
        (state / "progress.json").write_text("{}")
    with pytest.raises(UserError, match="every checkpoint under .* is damaged"):
        train_here(training_values, output, resume=True, **TEXT)


def test_workers_may_change_and_the_global_batch_may_not(training_values, whole, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    shutil.rmtree(output / "checkpoint")
    shutil.rmtree(output / "states/step-000008")
    changes = {"checkpoint_every": 2, "rate": {"target_retain_rate": 0.5}}
    with pytest.raises(UserError, match="the run had 2 sequences a step, and .* is 3"):
        train_here(training_values, output, resume=True, optimizer={"batch_size": 3}, **changes, **TEXT)
    train_here(training_values, output, resume=True, **changes, dataset={**TEXT["dataset"], "workers": 2})
    same_as(whole, output)


def test_a_price_goes_on_from_where_it_was(training_values, whole, tmp_path):
    """Training on from a checkpoint begins with that run's α and at a learning rate of its own; a resumed run keeps both
    and need not be told the checkpoint again."""
    changes = {"checkpoint_every": 4, "rate": {"target_retain_rate": 0.4}, "calibration": {"start": None}}
    once = tmp_path / "once"
    train_here(training_values, once, initial_checkpoint=str(whole / "checkpoint"), **changes)
    again = tmp_path / "again"
    shutil.copytree(once, again)
    shutil.rmtree(again / "checkpoint")
    shutil.rmtree(again / "states/step-000008")
    train_here(training_values, again, resume=True, **changes)
    same_as(once, again)
    prices = [json.loads(line)["alpha"] for line in (again / "metrics.jsonl").read_text().splitlines()]
    assert prices[0] != DEFAULT_PRICE
    with pytest.raises(UserError, match="--resume cannot change `rate.alpha`: .* with None, and now it is 8.0"):
        train_here(training_values, again, resume=True, **merged(changes, {"rate": {"alpha": 8.0}}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dataset": {"sequence_length": 32}},
            "--resume cannot change `dataset.sequence_length`: the run was started with 64, and now it is 32; set it back, "
            "or start another run, without --resume and with another `output`",
        ),
        (
            {"compressor": {"eviction": {"keep_ratio": 0.5}}},
            "--resume cannot change `compressor.eviction.keep_ratio`: the run was started with 1.0, and now it is 0.5; set ",
        ),
    ],
)
def test_what_may_not_change_is_named_in_full(training_values, whole, tmp_path, changes, message):
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    with pytest.raises(UserError) as caught:
        train_here(training_values, output, resume=True, **merged(TEXT, changes))
    assert str(caught.value).startswith(message)


def test_a_run_that_goes_on_with_other_settings_says_which(training_values, whole, tmp_path, capfd):
    output = tmp_path / "run"
    for changes, expected in (
        ({}, []),
        (
            {"loss": {"distillation": 0.5}, "log_every": 3},
            ["`log_every` was 1 and is 3", "`loss.distillation` was 0.0 and is 0.5"],
        ),
    ):
        shutil.copytree(whole, output)
        shutil.rmtree(output / "checkpoint")
        for state in saved_states(output / "states")[1:]:
            shutil.rmtree(state)
        train_here(
            training_values, output, checkpoint_every=2, resume=True,
            **merged({"rate": {"target_retain_rate": 0.5}, **TEXT}, changes),
        )  # fmt: skip
        told = [line for line in capfd.readouterr().out.splitlines() if "continues with other settings" in line]
        assert len(told) == bool(expected)
        assert all(each in told[0] for each in expected)
        shutil.rmtree(output)


def test_states_of_other_versions_are_refused_by_the_key_they_do_not_share(training_values):
    now = to_dict(build(TrainConfig, training_values))

    def message(change):
        saved = json.loads(json.dumps(now))
        change(saved)
        with pytest.raises(UserError) as caught:
            check_same_run(saved, now)
        return str(caught.value)

    check_same_run(json.loads(json.dumps(now)), now)
    assert message(lambda saved: saved.pop("lora")) == (
        "--resume cannot tell whether `lora.rank` stays as it was: the run was started by a version that does not know it, "
        "and now it is 16; go on with that version, or start another run, without --resume and with another `output`"
    )
    assert "`dataset.isolate_documents` stays" in message(lambda saved: saved["dataset"].pop("isolate_documents"))
    assert message(lambda saved: saved["compressor"].update(heads=[2, 3])).startswith(
        "--resume cannot keep `compressor.heads`: the run was started with [2, 3], and this version does not know it; "
    )


def test_what_may_change_may_be_missing_from_a_state(training_values):
    now = to_dict(build(TrainConfig, training_values))
    saved = json.loads(json.dumps(now))
    for section, key in (("dataset", "workers"), ("rate", "key_cost")):
        del saved[section][key]
    del saved["report"], saved["max_loss_increase"]
    saved["rate"]["gain"] = 5.0
    check_same_run(saved, now)


def test_a_share_of_the_documents_is_held_out_and_measured(whole):
    measured = json.loads((whole / "checkpoint/config.json").read_text())["summary"]["heldout"]
    assert measured.keys() == {"text.jsonl", "text.jsonl (held-out share)"}


def test_a_plan_keeps_the_target_that_it_was_made_for(training_values, tmp_path):
    changes = merged(PLANNED, {"optimizer": {"steps": 2}, "checkpoint_every": 1})
    train_here(training_values, tmp_path / "run", **changes)
    (tmp_path / "run/checkpoint").rename(tmp_path / "kept")
    other = merged(changes, {"rate": {"target_retain_rate": 0.2}, "optimizer": {"steps": 3}})
    with pytest.raises(UserError, match="cannot change `rate.target_retain_rate`: its plan of bits was made for 0.12"):
        train_here(training_values, tmp_path / "run", resume=True, **other)


def test_the_last_step_is_saved_before_what_follows_it(training_values, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("training.loop.finish", fail)
    with pytest.raises(KeyboardInterrupt):
        train_here(training_values, tmp_path / "run", checkpoint_every=2, optimizer={"steps": 3})
    monkeypatch.undo()
    with open(tmp_path / "run/metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo\n')  # as a process that was killed leaves it, and another one goes on behind it
    train_here(training_values, tmp_path / "run", resume=True, checkpoint_every=2, optimizer={"steps": 3})
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_run_goes_on_without_the_bases_it_began_from(training_values, tiny_dir, tmp_path):
    calibration_of(load_model(str(tiny_dir))).save(tmp_path / "bases", model="tiny", text=["random"])
    changes = {"calibration": {"bases": str(tmp_path / "bases")}, "checkpoint_every": 1}
    train_here(training_values, tmp_path / "run", optimizer={"steps": 1}, **changes)
    shutil.rmtree(tmp_path / "bases")
    shutil.rmtree(tmp_path / "run/checkpoint")
    train_here(training_values, tmp_path / "run", resume=True, optimizer={"steps": 2}, **changes)
    [record] = (tmp_path / "run/training").glob("*.json")
    assert "bases" in [each["role"] for each in json.loads(record.read_text())["inputs"]]


@pytest.mark.parametrize(("done", "is_fixed"), [(4, False), (5, True)])
def test_fixed_ranks_keep_their_target(training_values, done, is_fixed):
    """Of seven steps the first four (0 to 3, below 3.5) learn, and the fifth begins with ranks that are fixed."""
    changes = {"compressor": {"rank_policy": "soft_threshold"}, "optimizer": {"steps": 7}, "output": "none"}
    before, now = (
        build(TrainConfig, merged(training_values, {**changes, "rate": {"target_retain_rate": rate}}))
        for rate in (0.5, 0.4)
    )
    progress = {"step": done, "config": to_dict(before)}
    check_fixed_target(progress, before)
    if not is_fixed:
        check_fixed_target(progress, now)
        return
    with pytest.raises(UserError, match="its ranks were fixed for 0.5, and now it is 0.4"):
        check_fixed_target(progress, now)
