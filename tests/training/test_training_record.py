"""The run record of a training: one for a run, however often it is resumed, named in its checkpoint."""

from lowrank_kv.utils import provenance, run_record


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
