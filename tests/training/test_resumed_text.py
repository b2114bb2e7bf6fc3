"""A resumed run trains on the text of its first start, or refuses; its record names these files."""

import hashlib
import json
import shutil

import pytest
from training_runs import merged, train_here

from lowrank_kv.utils.errors import UserError
from training.resumable_state import CHECKSUM, _checksum_of

STATE = "states/step-000001/progress.json"
REMEDY = "give the earlier file, or start another run that trains on from this one's checkpoint .`initial_checkpoint`"


@pytest.fixture
def begun(training_values, text_file, tmp_path):
    """The settings of a run over three files of a pattern, with a step done, and these files."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (texts / name).write_text(text_file.read_text().replace("cache", name))
    shutil.copy(text_file, tmp_path / "held.jsonl")
    dataset = {"name": str(texts / "*.jsonl"), "heldout": str(tmp_path / "held.jsonl")}
    changes = {"checkpoint_every": 1, "dataset": dataset, "optimizer": {"steps": 1, "batch_size": 1}}
    values = merged(training_values, changes)
    train_here(values, tmp_path / "run")
    return merged(values, {"optimizer": {"steps": 2}}), texts


def inputs_of(output):
    [path] = (output / "training").glob("*.json")
    inputs = json.loads(path.read_text())["inputs"]
    return {each["name"]: (each["role"], each["sha256"]) for each in inputs if each["role"] != "model"}


def changed(texts):
    (texts / "b.jsonl").write_text((texts / "c.jsonl").read_text())
    return texts / "b.jsonl", "has changed since the run began"


def added(texts):
    shutil.copy(texts / "c.jsonl", texts / "d.jsonl")
    return texts / "d.jsonl", "was not there when the run began"


def removed(texts):
    (texts / "c.jsonl").unlink()
    return "c.jsonl", "is gone"


@pytest.mark.parametrize("change", [changed, added, removed])
def test_a_run_refuses_to_go_on_with_other_text(begun, tmp_path, change):
    values, texts = begun
    file, what = change(texts)
    with pytest.raises(UserError, match=rf"{file} of `dataset.name` {what}; {REMEDY}"):
        train_here(values, tmp_path / "run", resume=True)


def test_the_record_of_a_resumed_run_names_what_it_holds_out_now(begun, tmp_path):
    values, texts = begun

    def entry(role, path):
        return {path.name: (role, hashlib.sha256(path.read_bytes()).hexdigest())}

    expected = entry("heldout", tmp_path / "held.jsonl")
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        expected |= entry("text", texts / name)
    assert inputs_of(tmp_path / "run") == expected
    other = tmp_path / "other.jsonl"
    other.write_text((texts / "a.jsonl").read_text())
    heldout = {"heldout": [str(other), str(tmp_path / "held.jsonl"), str(texts / "a.jsonl")]}
    train_here(values, tmp_path / "run", resume=True, dataset=heldout)
    assert inputs_of(tmp_path / "run") == expected | entry("heldout", other)


def test_states_of_earlier_versions_have_one_role_for_all_texts(begun, tmp_path):
    values, texts = begun
    path = tmp_path / "run" / STATE
    progress = json.loads(path.read_text())
    for each in progress["inputs"]:
        each["role"] = each["role"].replace("heldout", "text")
    del progress[CHECKSUM]
    path.write_text(json.dumps({**progress, CHECKSUM: _checksum_of(progress)}))
    train_here(values, tmp_path / "run", resume=True)
    assert {role for role, _ in inputs_of(tmp_path / "run").values()} == {"text"}
    changed(texts)
    with pytest.raises(UserError, match="b.jsonl of `dataset.name` has changed since the run began"):
        train_here(merged(values, {"optimizer": {"steps": 3}}), tmp_path / "run", resume=True)
