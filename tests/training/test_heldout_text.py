"""A run says where it trains on what it holds out, or began from what has read it, when it begins and when it resumes."""

import os
import shutil

import pytest
from training_runs import train_here

from dynakv.training_config import TrainConfig
from lowrank_kv.hf.loading import load_model, load_tokenizer
from lowrank_kv.utils.config import build
from lowrank_kv.utils.text_data import CalibrationText
from ojakv import Calibration
from training.data_sources import warn_of_heldout_text

ONE_STEP = {"checkpoint_every": 1, "optimizer": {"steps": 1, "batch_size": 1}, "heldout_blocks": 1}


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("texts/train.jsonl", "texts/held.jsonl", "texts/a[1].jsonl", "other/held.jsonl", "linked.jsonl"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "linked.jsonl").unlink()
    os.link("texts/held.jsonl", "linked.jsonl")
    (tmp_path / "corpus").mkdir()  # whose files make a data set of several splits


@pytest.mark.parametrize(
    ("dataset", "is_told"),
    [
        ({"name": "texts/train.jsonl", "heldout": "texts/held.jsonl"}, False),
        ({"name": "texts/held.jsonl", "heldout": "texts/held.jsonl"}, True),
        ({"name": "texts/*.jsonl", "heldout": "texts/held.jsonl"}, True),
        ({"name": "texts/held.jsonl", "heldout": "texts/*.jsonl"}, True),
        ({"name": "texts/t*.jsonl", "heldout": "texts/h*.jsonl"}, False),
        ({"name": "texts/*.jsonl", "heldout": "other/*.jsonl"}, False),  # names alike, files not
        ({"name": "texts/*.jsonl", "heldout": "linked.jsonl"}, True),
        ({"name": "texts/a[1].jsonl", "heldout": "texts/a[1].jsonl"}, True),
        ({"name": "https://texts.org/*.jsonl", "heldout": "https://texts.org/held.jsonl"}, True),
        ({"name": "https://texts.org/train.jsonl", "heldout": "https://texts.org/held.jsonl"}, False),
        ({"name": "org/texts", "heldout": "org/texts"}, False),  # `heldout_split` is `test` by default
        ({"name": "org/texts", "heldout": "org/texts", "heldout_split": "train"}, True),
        ({"name": "org/texts", "heldout": "org/texts", "heldout_split": "train[:5%]"}, True),
        ({"name": "org/texts", "split": "train[5%:]", "heldout": "org/texts", "heldout_split": "train[:5%]"}, False),
        ({"name": ["org/a", "org/b"], "split": ["train", "test"], "heldout": "org/b"}, True),
        ({"name": "corpus", "heldout": "corpus"}, False),
        ({"name": "corpus", "heldout": "corpus", "heldout_split": "train"}, True),
        ({"name": "texts/*.jsonl", "heldout_share": 0.1}, False),
    ],
)
def test_text_that_is_trained_on_is_known_by_files_and_splits(texts, dataset, is_told, recwarn):
    config = build(TrainConfig, {"model": "m", "dataset": dataset})
    warn_of_heldout_text(config, config.dataset.records())
    assert ["which `dataset.name` trains on" in str(each.message) for each in recwarn] == [True] * is_told


def test_a_run_says_that_a_pattern_of_its_text_has_the_held_out_file(training_values, text_file, tmp_path):
    dataset = {"name": str(text_file.parent / "*.jsonl"), "heldout": str(text_file)}
    with pytest.warns(UserWarning, match=r"has .*text.jsonl, which `dataset.name` trains on"):
        train_here(training_values, tmp_path / "run", **ONE_STEP, dataset=dataset)


def test_a_resumed_run_says_that_its_bases_have_read_what_it_now_holds_out(
    training_values, text_file, tmp_path, recwarn
):
    """Also where it is no longer told of the bases."""
    calibrated = tmp_path / "calibrated.jsonl"
    shutil.copy(text_file, calibrated)
    text = CalibrationText(name=[str(calibrated)], tokens=256, length=64)
    blocks_NT = text.blocks(load_tokenizer(training_values["model"]))
    calibration = Calibration.from_text(load_model(training_values["model"]), blocks_NT, progress=False)
    calibration.save(tmp_path / "bases", model="", **text.record())
    bases, nothing = {"bases": str(tmp_path / "bases")}, {"heldout": None}
    train_here(training_values, tmp_path / "run", **ONE_STEP, calibration=bases, dataset=nothing)
    shutil.rmtree(tmp_path / "bases")
    named, unnamed = f"the calibration `{tmp_path / 'bases'}`", "the bases or the checkpoint that this run began from"
    for calibration, reader in ((bases, named), ({}, unnamed)):
        shutil.copytree(tmp_path / "run", tmp_path / "again")
        recwarn.clear()
        dataset = {"heldout": [str(calibrated), str(text_file)]}
        train_here(
            training_values, tmp_path / "again", resume=True, **ONE_STEP, calibration=calibration, dataset=dataset
        )
        found = [str(each.message) for each in recwarn]
        told = [each for each in found if "which this run holds out" in each]
        assert [each.startswith(f"{reader} read `calibrated.jsonl`, ") for each in told] == [True]
        assert sum("which `dataset.name` trains on" in each for each in found) == 1
        shutil.rmtree(tmp_path / "again")


def test_text_that_is_trained_on_is_no_unseen_text(training_values, tmp_path):
    with pytest.warns(
        UserWarning, match="which `dataset.name` trains on: what is measured on it says nothing of unseen"
    ):
        train_here(training_values, tmp_path / "run", optimizer={"steps": 1})
