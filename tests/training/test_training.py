"""The training command, run as a user runs it, on a tiny model."""

import json
import os
import re
import shutil
import time

import pytest
import yaml
from ready_python import program
from training_runs import merged, train_here
from transformers import AutoTokenizer

from dynakv.training_config import TrainConfig
from lowrank_kv.utils.config import build
from training import data_sources, engine, loop
from training.schedule import learning_rate_factor
from training.step import optimizer_step

LAUNCH = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/single.yaml")


@pytest.fixture
def config_file(training_values, tmp_path):
    """A configuration of eight short steps."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**training_values, "output": str(tmp_path / "run")}))
    return path


def metrics(directory) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in metrics(directory)}


def test_a_run_leaves_what_it_promises(run, config_file, tmp_path):
    launched = (*LAUNCH, "train_dynakv.py", "--config", config_file, "--full_checkpoint", "true")
    launched += ("--report.peak_flops", "null")  # it measures them itself
    done = run(*launched, env={**os.environ, "PYTHON_EXEC": program()})
    output = tmp_path / "run"
    assert f"checkpoint: {output}/checkpoint" in done.stdout
    rows = metrics(output)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[0]["hard_rate"] > 0.9
    assert rows[-1]["soft_rate"] < rows[0]["soft_rate"]
    for name in ("loss", "cross_entropy", "alpha", "tokens_per_second", "flop_utilization"):
        assert rows[0][name] > 0
    for shown in ("loss", "CE", "soft", "hard", "α", "tok/s"):
        assert shown in done.stderr
    assert sorted(p.name for p in (output / "states").iterdir()) == ["step-000004", "step-000008"]
    summary = json.loads((output / "checkpoint/config.json").read_text())["summary"]
    assert summary["tokens"] == 8 * 2 * 64
    assert 0 < summary["heldout"]["text.jsonl"]["hard_rate"] <= 1
    # Both checkpoints generate, and count their bytes.
    for directory in ("checkpoint", "full"):
        text = run("generate", "--checkpoint", output / directory, "--prompt", "the cache", "--max-new-tokens", 5)
        assert "rate" in text.stdout
        assert "uncompressed:" in text.stdout


def test_tensorboard_holds_scalars_and_the_heat_map(training_values, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_here(training_values, tmp_path / "run", optimizer={"steps": 2})
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert {"train/loss", "train/hard_rate", "train/alpha", "train/hard_rate_keys", "train/hard_rate_values"} <= set(
        tags["scalars"]
    )
    maps = {"rate/layers_by_keys_values", "conditioning/layers_by_keys_values"}
    assert set(tags["images"]) == maps | {"sentence/tokens", "sentence/layers_by_tokens"}


def test_a_run_that_fails_keeps_its_last_events(training_values, tmp_path, monkeypatch):
    """They are written behind its back, here to a slow disk."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer.record_writer import RecordWriter

    write = RecordWriter.write

    def slowly(self, data):
        time.sleep(0.02)
        write(self, data)

    def step(engine, batches, alpha, *, number, **settings):
        if number == 3:
            raise MemoryError
        return optimizer_step(engine, batches, alpha, number=number, **settings)

    monkeypatch.setattr(loop, "optimizer_step", step)
    monkeypatch.setattr(RecordWriter, "write", slowly)
    with pytest.raises(MemoryError):
        train_here(training_values, tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/peak_memory_bytes")] == [1, 2]


def test_a_resumed_run_equals_the_uninterrupted_one(run, mistake, config_file, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    arguments = ("train_dynakv.py", "--config", config_file, "--rate.target_retain_rate", "0.5")
    run(*arguments, "--output", whole)
    # As if the run had been killed right after step 4.
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "states/step-000008")
    shutil.rmtree(parts / "checkpoint")
    assert "holds an earlier run; pass --resume" in mistake(*arguments, "--output", parts)
    run(*arguments, "--output", parts, "--resume")
    assert [row["step"] for row in metrics(parts)] == list(range(1, 9)), "every step once"
    assert losses(parts) == losses(whole)
    assert (parts / "checkpoint/compressor.safetensors").read_bytes() == (
        whole / "checkpoint/compressor.safetensors"
    ).read_bytes()


def test_straight_through_switches_masks_midway(training_values, tmp_path):
    late, never = tmp_path / "late", tmp_path / "never"
    train_here(training_values, late, compressor={"mask": "straight_through"}, straight_through_from=0.5)
    train_here(training_values, never, compressor={"mask": "straight_through"}, straight_through_from=1.0)
    switched, soft = losses(late), losses(never)
    assert [step for step in soft if switched[step] == soft[step]] == [1, 2, 3, 4]


def test_a_resumed_run_must_be_the_same_run(mistake, training_values, config_file, tmp_path):
    train_here(training_values, tmp_path / "run", optimizer={"steps": 4})
    error = mistake("train_dynakv.py", "--config", config_file, "--resume", "--seed", "5")
    assert "--resume cannot change `seed`: the run was started with 0, and now it is 5" in error


def test_the_calibrated_threshold_gives_the_target_rate(training_values, tmp_path):
    rate = {"target_retain_rate": 0.9, "alpha": 0.01, "calibrate_threshold_tokens": 16384}
    train_here(training_values, tmp_path / "run", rate=rate, compressor={"granularity": 1})
    summary = json.loads((tmp_path / "run/checkpoint/config.json").read_text())
    calibrated = summary["summary"]["calibrated_threshold"]
    assert summary["compressor"]["threshold"] == calibrated["threshold"] != 0.1
    # A step of τ moves the rate by less than a thousandth; uncalibrated it is 0.994.
    assert 0.898 < calibrated["hard_rate"] <= 0.9
    assert summary["summary"]["heldout"]["text.jsonl"]["hard_rate"] == pytest.approx(calibrated["hard_rate"], abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--optimizer.stpes", "3"), "unknown argument `--optimizer.stpes`; did you mean `--optimizer.steps`?"),
        (("--dataset.sequence_length", "513"), "`dataset.sequence_length` is 513 tokens, but this model has 512"),
        (("--dataset.name", "EMPTY"), "is empty"),
        (("--dataset.name", "nowhere.jsonl"), "`nowhere.jsonl` does not exist"),
        (("--dataset.text_field", "body"), "no column `body`, only text"),
        (("--dataset.name", "NUMBERS"), "column `text` of the data set .* holds int, not text"),
        (("--dataset.name", "NOTES"), r"`.*notes.md` is of no known kind; give it its own of the endings .txt, .json"),
        (
            ("--dataset.name", "BROKEN"),
            r"cannot load the data set `.*broken.jsonl`: .*JSON parse error.*; mend the file",
        ),
        (("--dataset.name", "NOTHING"), r"the data set `.*nothing.jsonl` is empty: it has no rows"),
        (("--dataset.name", "MIXED"), r"holds int in row 2, not text; mend the row"),
        (("--dataset.heldout", "nowhere.jsonl"), "`nowhere.jsonl` does not exist; check `dataset.heldout`"),
        (
            ("--trainable", "full", "--loss.distillation", "1"),
            "to learn from; `loss.cross_entropy: 1` learns from text",
        ),
        (("--output", "EMPTY"), r"`.*empty.jsonl` cannot be a directory, since `.*empty.jsonl` is a file"),
        (("--model", "./nowhere"), "model directory `./nowhere` does not exist"),
        (("--resume",), "nothing to resume"),
        (("--compressor.granularity", "33"), "`compressor.granularity` must be in 1..32 for this model, got 33"),
        (("--compressor.threshold", "2"), "`compressor.threshold` must be between 0 and 1"),
    ],
)
def test_mistakes_end_in_one_paragraph(mistake, config_file, tmp_path, arguments, message):
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": ""}\n')
    numbers = tmp_path / "numbers.jsonl"
    numbers.write_text('{"text": 7}\n')
    notes = tmp_path / "notes.md"
    notes.write_text("text\n")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "whole"}\n{"text": "cut')
    nothing, mixed = tmp_path / "nothing.jsonl", tmp_path / "mixed.jsonl"
    nothing.write_text("")
    mixed.write_text('{"text": null}\n{"text": 5}\n{"text": "whole"}\n')
    files = {"EMPTY": empty, "NUMBERS": numbers, "NOTES": notes, "BROKEN": broken, "NOTHING": nothing, "MIXED": mixed}
    arguments = [str(files.get(word, word)) for word in arguments]
    assert re.search(message, mistake("train_dynakv.py", "--config", config_file, *arguments))
    assert not (tmp_path / "run").exists()


def test_held_out_texts_have_columns_of_their_own_and_names_apart(training_values, text_file, tmp_path):
    """The training text's column is another, and two held-out files have one name."""
    for name, column in (("train", "body"), ("one", "text"), ("two", "text")):
        (tmp_path / name).mkdir()
        rows = [{column: json.loads(line)["text"]} for line in text_file.read_text().splitlines()]
        (tmp_path / name / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name == "one" :]))
    heldout = [str(tmp_path / name / "t.jsonl") for name in ("one", "two")]
    dataset = {"name": str(tmp_path / "train/t.jsonl"), "text_field": "body", "heldout": heldout}
    train_here(training_values, tmp_path / "run", dataset=dataset, optimizer={"steps": 1})
    measured = json.loads((tmp_path / "run/checkpoint/config.json").read_text())["summary"]["heldout"]
    assert list(measured) == ["one/t.jsonl", "two/t.jsonl"]
    assert measured["one/t.jsonl"] != measured["two/t.jsonl"]


def test_held_out_text_is_streamed_where_the_rest_is(training_values, monkeypatch):
    asked = []
    load = data_sources.load_documents
    monkeypatch.setattr(
        data_sources, "load_documents", lambda *args, **options: asked.append(options) or load(*args, **options)
    )
    for streaming in (False, True):
        config = build(TrainConfig, merged(training_values, {"dataset": {"streaming": streaming}}))
        [blocks] = data_sources.heldout_blocks(config, AutoTokenizer.from_pretrained(config.model)).values()
        assert len(blocks) == 1
        assert asked.pop()["streaming"] is streaming


@pytest.mark.parametrize(
    ("own", "launchers", "processes", "threads"),
    [({0, 1, 2, 3}, {0, 1, 2, 3}, 2, 2), ({2, 3}, {0, 1, 2, 3}, 2, 2), ({5}, {5}, 4, 1)],
    ids=["shared", "bound", "fewer cores than processes"],
)
def test_a_machines_cores_are_shared_unless_processes_are_bound(monkeypatch, own, launchers, processes, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: launchers if process == os.getppid() else own)
    assert engine._threads(world=8) == threads


def test_schedule_rises_then_falls():
    factors = [learning_rate_factor(step, 100, warmup=0.1, final=0.2) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[10] == 1.0
    assert factors[9] == 1.0
    assert factors[-1] == pytest.approx(0.2, abs=0.01)
    assert factors[10:] == sorted(factors[10:], reverse=True)
