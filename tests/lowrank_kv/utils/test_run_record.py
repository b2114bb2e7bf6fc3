"""Records of measurements: what they hold, how they are written, and what is refused."""

import json
import os
import subprocess

import pytest
import torch
from methods import tiny_model

from lowrank_kv.hf.loading import load_model, load_shape
from lowrank_kv.utils import provenance, run_record
from lowrank_kv.utils.run_record import RecordError


def record(**changes):
    made = run_record.new_record(
        "quality",
        config={"model": "tiny", "blocks": 2},
        inputs=[provenance.content_input("model", "tiny", "{}")],
        n={"blocks": 2, "tokens": 512},
        rows=[{"method": "full", "perplexity": 21.5}, {"method": "dynakv", "perplexity": 22.25}],
        argv=["scripts/compare_ranks.py", "--output", "runs/x"],
    )
    return made | changes


def test_what_is_written_is_read(tmp_path):
    made = record()
    path = run_record.write(made, tmp_path)
    assert path == tmp_path / "quality" / f"{made['run_id']}.json"
    assert run_record.RUN_ID.fullmatch(path.stem)
    loaded = run_record.load(path)
    assert loaded == made | {"sha256": loaded["sha256"]}
    assert loaded["command"] == ["python", "scripts/compare_ranks.py", "--output", "runs/x"]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_record_is_read_from_within_its_directory(tmp_path, monkeypatch):
    path = run_record.write(record(), tmp_path)
    monkeypatch.chdir(path.parent)
    assert run_record.load(path.name) == run_record.load(path)


def test_ids_tell_runs_apart():
    assert record()["run_id"] != record()["run_id"]


def test_a_row_has_a_line(tmp_path):
    text = run_record.write(record(), tmp_path).read_text()
    assert '\n    {"method":"dynakv","perplexity":22.25}\n' in text


def test_a_changed_row_is_refused(tmp_path):
    path = run_record.write(record(), tmp_path)
    path.write_text(path.read_text().replace("22.25", "21.25"))
    with pytest.raises(RecordError, match=rf"quality/{path.name}: `sha256` .*restore it from git"):
        run_record.load(path)


def test_a_renamed_file_is_refused(tmp_path):
    path = run_record.write(record(), tmp_path)
    other = path.rename(path.with_name("20261124T101530-3f9a1c.json"))
    with pytest.raises(RecordError, match="move it to the place of that name"):
        run_record.load(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "beauty"}, "`kind` must be one of quality, speed"),
        ({"surprise": 1}, "`surprise` is not a key of the schema"),
        ({"n": {}}, "`n` is empty; say how many"),
        ({"n": {"blocks": 0}}, "`n.blocks` must be a whole number of at least 1, got 0"),
        ({"rows": []}, "`rows` and `summary` are empty"),
        ({"rows": [{"x": float("nan")}]}, "cannot be written as JSON"),
        ({"rows": [1]}, "each of `rows` must be a mapping"),
        ({"command": "python x"}, "`command` must be of type list"),
        ({"config": None}, "`config` is null; measure it, or, .* `legacy.missing`"),
        ({"inputs": [{"role": "bases"}]}, "`inputs.bases.name` is missing"),
        ({"environment": {}}, "`environment.python` is missing"),
        ({"run_id": "best"}, "`run_id` must look like"),
        ({"schema": 2}, "`schema` must be 1, got 2; read it with the version that wrote it"),
    ],
)
def test_what_does_not_follow_the_schema_is_refused(tmp_path, changes, message):
    made = record(**changes)
    with pytest.raises(RecordError, match=message) as error:
        run_record.write(made, tmp_path)
    assert str(error.value).startswith(f"{made['kind']}/{made['run_id']}.json: ")
    assert not list(tmp_path.rglob("*"))


def test_a_missing_key_and_file_are_named(tmp_path):
    path = run_record.write(record(), tmp_path)
    values = json.loads(path.read_text())
    del values["code"]
    path.write_text(json.dumps(values))
    with pytest.raises(RecordError, match="`code` is missing; begin the record by run_record.new_record"):
        run_record.load(path)
    with pytest.raises(RecordError, match="quality/none.json: there is no such record; runs keep theirs"):
        run_record.load(path.with_name("none.json"))
    with pytest.raises(RecordError, match="there is no such record"):
        run_record.load(path / "none.json")  # as if the file were a directory
    with pytest.raises(RecordError, match="is a directory, and a record is a file; name one"):
        run_record.load(path.parent)
    path.write_text("{")
    with pytest.raises(RecordError, match="is no run record"):
        run_record.load(path)


def test_an_older_run_says_what_it_cannot_prove(tmp_path):
    legacy = {"source": ["results/old.json"], "added_in": "abc", "missing": ["command", "inputs"], "stated": {}}
    made = record(command=None, inputs=None, legacy=legacy)
    assert run_record.load(run_record.write(made, tmp_path))["command"] is None
    legacy["missing"].remove("inputs")
    with pytest.raises(RecordError, match="`inputs` is null"):
        run_record.write(made, tmp_path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    made = record()
    path = run_record.write(made, tmp_path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        run_record.write(made | {"summary": {"x": 1}}, tmp_path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: calls.append("fsync") or fsync(handle))
    monkeypatch.setattr(os, "replace", lambda *names: calls.append("replace") or replace(*names))
    run_record.write(record(), tmp_path)
    assert calls == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/me/runs/checkpoint", "checkpoint"),
        ("~/models/tiny", "tiny"),
        ("../shared/novel.txt", "novel.txt"),
        ("--text=novel=/data/novel.txt", "--text=novel=novel.txt"),
        ("a,/b/c,d/e", "a,c,d/e"),
        ("C:\\Users\\me\\file", "file"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("configs/compare-demo.yaml", "configs/compare-demo.yaml"),
        ("a / b", "a / b"),
        ("https://host.org/texts/a.jsonl.gz", "https://host.org/texts/a.jsonl.gz"),
        ("hf://datasets/org/name/a.parquet,/data/b.txt", "hf://datasets/org/name/a.parquet,b.txt"),
        ("--name=https://me:secret@host.org:80/a?token=secret", "--name=https://host.org:80/a"),
        ("file:///data/me/a.txt", "file:a.txt"),
    ],
)
def test_paths_of_the_machine_are_cut_to_names(text, expected):
    assert provenance.without_paths({"x": [text]}) == {"x": [expected]}


def test_keys_that_are_alike_without_their_paths_are_numbered():
    found = provenance.without_paths({"/data/wiki/val.jsonl": 1, "/data/books/val.jsonl": 2, "b": 3})
    assert found == {"val.jsonl": 1, "val.jsonl #2": 2, "b": 3}


def test_the_users_name_does_not_appear(monkeypatch):
    monkeypatch.setattr(provenance.getpass, "getuser", lambda: "alice")
    assert provenance.without_paths("runs/alice/checkpoint") == "checkpoint"
    assert provenance.without_paths("https://host.org/alice/a") == "https://host.org/alice/a"


def test_written_records_hold_no_path(tmp_path):
    made = record(config={"checkpoint": str(tmp_path / "checkpoint")})
    text = run_record.write(made, tmp_path).read_text()
    assert str(tmp_path) not in text
    assert run_record.load(tmp_path / "quality" / f"{made['run_id']}.json")["config"] == {"checkpoint": "checkpoint"}


def test_a_directorys_digest_is_its_content_and_names(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "inner").mkdir(parents=True)
        for file in sorted(("b.bin", "inner/a.bin"), reverse=name == "two"):
            (tmp_path / name / file).write_bytes(file.encode())
    first = provenance.digest(tmp_path / "one")
    assert first == provenance.digest(tmp_path / "two")
    (tmp_path / "two" / "b.bin").rename(tmp_path / "two" / "c.bin")
    assert first != provenance.digest(tmp_path / "two")


def test_a_checkpoint_names_the_run_that_trained_it(tmp_path):
    assert provenance.trained_by(tmp_path) is None
    provenance.name_trainer(tmp_path, "20261124T101530-3f9a1c")
    entry = provenance.path_input("checkpoint", tmp_path)
    assert entry["run_id"] == "20261124T101530-3f9a1c"
    assert entry["name"] == tmp_path.name


def test_a_pattern_stands_for_its_files_and_a_hub_id_for_none(tmp_path):
    for name in ("b.txt", "a.txt", "c.json"):
        (tmp_path / name).write_text(name)
    names = [str(tmp_path / "*.txt"), "Salesforce/wikitext", str(tmp_path / "c.json"), "https://host.example/a.txt"]
    found = provenance.file_inputs("text", names)
    assert [each["name"] for each in found] == ["a.txt", "b.txt", "c.json"]
    assert found[0] == provenance.path_input("text", tmp_path / "a.txt")


def test_a_configuration_is_the_same_wherever_a_model_lies_and_however_it_is_loaded(tmp_path):
    model = tiny_model()
    for name in ("one/tiny", "two/tiny"):
        model.save_pretrained(tmp_path / name)
    first = provenance.model_input(load_model(str(tmp_path / "one/tiny")))
    assert first == provenance.model_input(load_model(str(tmp_path / "two/tiny"), dtype="bfloat16"))
    assert first == provenance.model_input(load_shape(str(tmp_path / "two/tiny")))
    assert first["name"] == "tiny"
    assert first["sha256"] != provenance.model_input(tiny_model(num_hidden_layers=1))["sha256"]


def test_models_of_one_configuration_are_told_apart_by_their_weights():
    first, other, again = tiny_model(), tiny_model(seed=1), tiny_model()
    assert provenance.model_input(first) == provenance.model_input(other)
    assert provenance.weights_input(first)["sha256"] != provenance.weights_input(other)["sha256"]
    assert provenance.weights_input(first) == provenance.weights_input(again)
    again.model.layers[2].mlp.up_proj.weight.data.mul_(1.001)  # one matrix of many was trained on
    assert provenance.weights_input(first)["sha256"] != provenance.weights_input(again)["sha256"]
    halves = provenance.weights_input(tiny_model().bfloat16())["sha256"]
    assert halves != provenance.weights_input(first)["sha256"]
    assert halves == provenance.weights_input(tiny_model().bfloat16())["sha256"]


def test_the_hash_of_weights_sees_every_column_of_a_large_matrix(monkeypatch):
    monkeypatch.setattr(provenance, "_HASHED_NUMBERS", 64)
    first, other = tiny_model(), tiny_model()
    other.lm_head.weight.data[:, 17] += 1  # an even step through rows of 64 would never come to it
    assert provenance.weights_input(first)["sha256"] != provenance.weights_input(other)["sha256"]


def test_a_text_is_its_tokens():
    ids = torch.arange(6).view(2, 3)
    entry = provenance.token_input("text", "news", ids)
    assert entry == provenance.token_input("text", "news", ids.flatten())
    assert entry["sha256"] != provenance.token_input("text", "news", ids + 1)["sha256"]


def test_the_commit_is_that_of_a_checkout_that_tracks_the_code(tmp_path):
    def git(*arguments):
        settings = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(["git", *settings, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)

    source = tmp_path / "code.py"
    source.write_text("x = 1\n")
    git("init", "-q")
    assert provenance.code_state(source)["commit"] is None  # untracked: some other project's checkout
    git("add", "code.py")
    git("commit", "-qm", "x")
    state = provenance.code_state(source)
    assert state["commit"] == git("rev-parse", "HEAD").stdout.strip()
    assert state["dirty"] is False
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "run.json").write_text("{}")
    assert provenance.code_state(source)["dirty"] is False
    source.write_text("x = 2\n")
    assert provenance.code_state(source)["dirty"] is True
