"""The run record of a training: one for a run, however often it is resumed, named in its checkpoint."""

import json

import pytest
import yaml
from huggingface_hub import ModelCard

from lowrank_kv.utils import provenance, run_record
from training.data_sources import labels_of
from training.run_records import write_record


def test_a_training_writes_one_record_and_its_checkpoint_names_it(here, four_steps, tmp_path):
    output = tmp_path / "run"
    here("train_dynakv.py", "--config", four_steps)
    [path] = (output / "training").iterdir()
    record = run_record.load(path)
    assert provenance.trained_by(output / "checkpoint") == record["run_id"]
    assert record["outputs"] == [provenance.path_input("checkpoint", output / "checkpoint")]
    assert [each["role"] for each in record["inputs"]] == ["model", "text"]
    assert record["n"] == {"steps": 4, "tokens": 4 * 2 * 64}
    assert record["summary"]["heldout"]
    here("train_dynakv.py", "--config", four_steps, "--resume", "--optimizer.steps", 6)
    assert [*(output / "training").iterdir()] == [path]
    assert [row["step"] for row in run_record.load(path)["rows"]] == [1, 2, 3, 4, 5, 6]


def test_texts_are_told_apart_by_as_much_of_their_names_as_it_takes():
    names = ["/data/wiki/val.jsonl", "/data/books/val.jsonl", "org/text", "org/text", "other.jsonl"]
    assert labels_of(names) == ["wiki/val.jsonl", "books/val.jsonl", "text #3", "text #4", "other.jsonl"]
    assert labels_of(["/a/val.jsonl"]) == ["val.jsonl"]


def test_figures_that_are_no_numbers_cost_no_record(tmp_path):
    record = run_record.new_record("training", config={}, inputs=[], n={"steps": 2})
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": NaN, "heldout": {"a": {"kl": Infinity}}}\n')
    write_record(record, tmp_path, metrics, {"heldout": {"a": {"kl": float("nan")}}}, [])
    [path] = (tmp_path / "training").iterdir()
    found = run_record.load(path)
    assert found["rows"] == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None, "heldout": {"a": {"kl": None}}}]
    assert found["summary"] == {"heldout": {"a": {"kl": None}}}


def test_a_training_writes_a_model_card_that_the_hub_can_read(here, four_steps, tmp_path, tiny_dir):
    directory = tmp_path / "run/checkpoint"
    here("train_dynakv.py", "--config", four_steps, "--heldout_blocks", 3)
    card = ModelCard.load(directory / "README.md")
    assert card.data.base_model == tiny_dir.name
    assert card.data.library_name == "transformers"
    assert {"lowrank-kv", "kv-cache"} <= set(card.data.tags)
    assert card.data.datasets is None  # a file of one's own is none of the hub's
    [path] = (tmp_path / "run/training").iterdir()
    record = run_record.load(path)
    [(name, found)] = record["summary"]["heldout"].items()
    perplexity, kl = (
        f"{found[key]:{form}} ({found[f'{key}_low']:{form}} to {found[f'{key}_high']:{form}})"
        for key, form in (("perplexity", ".3f"), ("kl", ".4f"))
    )
    assert f"| {name} | {found['hard_rate']:.1%} | {perplexity} | {kl} | {found['scored']:,} |" in card.text
    assert record["run_id"] in card.text
    assert str(tmp_path) not in card.content
    here("train_dynakv.py", "--config", four_steps, "--heldout_blocks", 3, "--resume", "--optimizer.steps", 6)
    assert "in 6 steps" in (directory / "README.md").read_text()


@pytest.mark.parametrize("divided_by", ["blocks", "documents"])
def test_a_training_says_when_a_text_begins_again(here, four_steps, tmp_path, divided_by):
    """A step reads 128 tokens of bytes. One text ends in the first step, the other has enough for all of them."""
    for name, count in (("short.jsonl", 3), ("long.jsonl", 200)):
        lines = [json.dumps({"text": f"document {number} of {name}"}) for number in range(count)]
        (tmp_path / name).write_text("\n".join(lines))
    names = [str(tmp_path / name) for name in ("short.jsonl", "long.jsonl")]
    values = yaml.safe_load(four_steps.read_text())
    values["dataset"] |= {"name": names, "heldout": None, "divided_by": divided_by}
    four_steps.write_text(yaml.safe_dump(values | {"heldout_blocks": 0}))
    told = here("train_dynakv.py", "--config", four_steps)
    assert told.count("begins short.jsonl again") == 1
    assert "begins long.jsonl again" not in told
    rounds = yaml.safe_load((tmp_path / "run/summary.yaml").read_text())["rounds"]
    assert rounds["short.jsonl"] > 1 == rounds["long.jsonl"]
    assert "| read more than once | short.jsonl |" in (tmp_path / "run/checkpoint/README.md").read_text()
    assert "again" not in here("train_dynakv.py", "--config", four_steps, "--resume", "--optimizer.steps", 6)
