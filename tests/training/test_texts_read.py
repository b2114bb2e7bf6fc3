"""What a checkpoint says of the texts that it comes from, and who is warned of them."""

import shutil

import pytest
import torch
from training_runs import train_here

import dynakv
from dynakv.checkpoint import save_again
from dynakv.checkpoint_files import read_config
from dynakv.known_texts import known_texts
from evaluation.compare import CompareConfig, compare
from lowrank_kv.hf.loading import load_model
from lowrank_kv.utils.config import build
from ojakv import Calibration

BASES = {"text": ["calibrated.jsonl"], "split": "train", "heldout_share": 0.1}
CHANGES = {"checkpoint_every": 1, "optimizer": {"steps": 1, "batch_size": 1}, "heldout_blocks": 0}


def read_by(checkpoint):
    return [known.record for known in known_texts(checkpoint)]


@pytest.fixture
def bases(tiny_dir, tmp_path):
    ids = torch.randint(1, 257, (3, 64), generator=torch.Generator().manual_seed(0))
    calibration = Calibration.from_text(load_model(str(tiny_dir)), ids, progress=False)
    calibration.save(tmp_path / "bases", model="tiny", **BASES)
    return tmp_path / "bases"


def test_a_checkpoint_names_the_texts_of_its_training_and_of_its_bases(training_values, bases, text_file, tmp_path):
    """Also when the run goes on where its bases are gone, and when another run goes on from the checkpoint."""
    dataset = {"heldout": None, "heldout_share": 0.2}
    changes = {**CHANGES, "calibration": {"bases": str(bases)}, "dataset": dataset}
    trained = {"text": [text_file.name], "split": "train", "heldout_share": 0.2}
    assert read_by(train_here(training_values, tmp_path / "run", **changes)) == [trained, BASES]
    shutil.rmtree(bases)
    again = changes | {"optimizer": {"steps": 2, "batch_size": 1}}
    first = train_here(training_values, tmp_path / "run", resume=True, **again)
    assert read_by(first) == [trained, BASES]
    further = {**CHANGES, "initial_checkpoint": str(first), "dataset": {"heldout": None}}
    second = train_here(training_values, tmp_path / "further", **further)
    assert read_by(second) == [{**trained, "heldout_share": 0.0}, trained, BASES]


def test_a_run_says_that_its_initial_checkpoint_has_read_what_it_holds_out(training_values, text_file, tmp_path):
    first = train_here(training_values, tmp_path / "first", **CHANGES, dataset={"heldout": None})
    dataset = {"heldout": None, "heldout_share": 0.2}
    with pytest.warns(UserWarning, match=r"and this run holds out 0.2 of it.*train with `--dataset.heldout_share 0.2`"):
        train_here(training_values, tmp_path / "run", **CHANGES, initial_checkpoint=str(first), dataset=dataset)


@pytest.mark.parametrize(
    ("left_out", "message"), [(0.0, "so that some of these documents were read; train with"), (0.5, None)]
)
def test_a_comparison_says_that_a_checkpoint_was_trained_on_its_text(
    checkpoint, text_file, tmp_path, recwarn, left_out, message
):
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    record = {"text": [text_file.name], "split": "train", "heldout_share": left_out}
    model = dynakv.attach(load_model(read_config(checkpoint).base_model), checkpoint)
    save_again(model, tmp_path / "checkpoint", {"texts_read": [record]})
    values = {
        "dtype": "float32",
        "texts": [{"label": "t", "name": str(text_file), "heldout_share": 0.5}],
        "methods": [{"checkpoint": str(tmp_path / "checkpoint")}],
        "prefix": 16,
        "length": 32,
        "windows": 1,
        "anatomy": False,
    }
    (tmp_path / "out").mkdir()
    list(compare(build(CompareConfig, values), tmp_path / "out"))
    found = [str(each.message) for each in recwarn if "the checkpoint" in str(each.message)]
    assert [message in each for each in found] == ([] if message is None else [True])
