"""What a run says of the bases that it starts from, where these have read what it holds out."""

import pytest
from training_runs import train_here

from dynakv.training_config import TrainConfig
from lowrank_kv.hf.loading import load_model, load_tokenizer
from lowrank_kv.utils.config import build
from lowrank_kv.utils.text_data import CalibrationText
from ojakv import Calibration
from training.data_sources import warn_of_heldout_text


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
