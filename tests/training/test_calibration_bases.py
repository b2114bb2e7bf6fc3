"""What a run says of its bases, where these have read what it holds out, or were taken beside other exact tokens."""

import dataclasses
import json

import pytest
import torch
from methods import calibration_of, tiny_model
from training_runs import EXACT, PLANNED, merged, train_here

from dynakv.training_config import TrainConfig
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.hf.loading import load_model, load_tokenizer
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.text_data import CalibrationText
from ojakv import Calibration
from training.data_sources import warn_of_heldout_text
from training.initialization import warn_of_exact_tokens


@pytest.mark.parametrize(
    ("record", "dataset", "message"),
    [
        ({"heldout_share": 0.1}, {"heldout_share": 0.2}, "with `heldout_share: 0.1`, and this run holds out 0.2 of it"),
        ({}, {"heldout_share": 0.2}, "with `heldout_share: 0`, and this run holds out 0.2 of it"),
        ({"heldout_share": 0.2}, {"heldout_share": 0.2}, None),
        ({"text": ["other.jsonl"]}, {"heldout_share": 0.2}, None),
        ({"heldout_share": 0.2}, {"heldout": None}, None),
        ({"text": ["text.jsonl", "heldout.jsonl"]}, {"heldout": "heldout.jsonl"}, "which this run holds out"),
        ({"text": ["org/text"], "split": "train"}, {"heldout": "org/text", "heldout_split": "test"}, None),
        (
            {"text": ["org/text"], "split": "test"},
            {"heldout": "org/text", "heldout_split": "test"},
            "this run holds out",
        ),
    ],
)
def test_bases_that_can_know_held_out_text_are_told(record, dataset, message, recwarn):
    values = {"model": "m", "calibration": {"bases": "bases"}, "dataset": {"name": "text.jsonl", **dataset}}
    config = build(TrainConfig, values)
    warn_of_heldout_text(config, [*config.dataset.records(), {"text": ["text.jsonl"], **record}])
    found = [str(each.message) for each in recwarn]
    assert [message in each for each in found] == ([] if message is None else [True])
    assert all(each.startswith("the calibration `bases` read `") for each in found)


def test_a_run_says_that_its_bases_have_read_what_it_holds_out(training_values, tmp_path):
    model, name = load_model(training_values["model"], dtype="float32"), training_values["dataset"]["name"]
    text = CalibrationText(name=[name], heldout_share=0.1, tokens=256, length=64)
    calibration = Calibration.from_text(model, text.blocks(load_tokenizer(training_values["model"])), progress=False)
    calibration.save(tmp_path / "bases", model="", **text.record())
    changes = {
        "calibration": {"start": "pca", "bases": str(tmp_path / "bases")},
        "dataset": {"heldout": None, "heldout_share": 0.2},
        "heldout_blocks": 0,
        "optimizer": {"steps": 1, "batch_size": 1},
    }
    with pytest.warns(UserWarning, match=r"read `text.*` with `heldout_share: 0.1`, and this run holds out 0.2 of it"):
        train_here(training_values, tmp_path / "run", **changes)


def test_a_run_says_that_its_bases_were_taken_beside_other_exact_tokens(training_values, tmp_path):
    model = load_model(training_values["model"], dtype="float32")
    blocks_NT = torch.randint(1, 257, (4, 64), generator=torch.Generator().manual_seed(0))
    directory = tmp_path / "bases"
    Calibration.from_text(model, blocks_NT, read_gradients=True, progress=False).save(
        directory, model="", text=["random"]
    )
    assert Calibration.load(directory).exact_tokens == ExactTokens()
    values = merged(
        merged(training_values, PLANNED), {"calibration": {"bases": str(directory)}, "optimizer": {"steps": 1}}
    )
    beside = (
        r"`compressor.exact_tokens` is {'num_sink_tokens': 2, .* beside {'num_sink_tokens': 4, 'recent_window': 16, "
    )
    with pytest.warns(UserWarning, match=f"{beside}.*; leave out `calibration.bases`"):
        train_here(values, tmp_path / "run")


@pytest.mark.parametrize("found", [None, EXACT])
def test_equal_ones_and_older_calibrations_are_used_in_silence(found, recwarn):
    config = build(TrainConfig, merged(PLANNED, {"model": "m", "dataset": {"name": "n"}}))
    config = dataclasses.replace(config, compressor=dataclasses.replace(config.compressor, exact_tokens=EXACT))
    warn_of_exact_tokens(config, Calibration(geometry=None, moments={}, exact_tokens=found))
    assert not recwarn.list


def test_a_calibration_that_says_nothing_of_exact_tokens_is_loaded_and_one_that_is_damaged_is_not(tmp_path):
    calibration_of(tiny_model(), read=True).save(tmp_path / "bases", model="", text=["random"])
    path = tmp_path / "bases/config.json"
    config = json.loads(path.read_text())
    del config["exact_tokens"]
    path.write_text(json.dumps(config))
    assert Calibration.load(tmp_path / "bases").exact_tokens is None
    path.write_text(json.dumps({**config, "exact_tokens": {"recent_window": -1}}))
    with pytest.raises(UserError, match=r"`recent_window` must be at least 0; got -1 in .*config.json"):
        Calibration.load(tmp_path / "bases")
