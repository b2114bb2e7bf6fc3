"""A run that ends with the mean of its last states."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from training_runs import assert_is_mean, merged, summary, train_here
from transformers import AutoModelForCausalLM, AutoTokenizer

import dynakv
from dynakv.training_config import TrainConfig
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from training.data_sources import heldout_blocks
from training.validation import measure

AVERAGED = {
    "checkpoint_every": 2,
    "keep_checkpoints": 3,
    "average_checkpoints": 3,
    "rate": {"target_retain_rate": 0.5, "calibrate_threshold_tokens": 128},
}


@pytest.fixture(scope="module")
def averaged(training_values, tmp_path_factory):
    output = tmp_path_factory.mktemp("averaged") / "run"
    train_here(training_values, output, **AVERAGED)
    return output


def test_the_compressor_is_the_mean(averaged):
    assert_is_mean(averaged, [4, 6, 8])


def test_what_is_calibrated_and_measured_is_the_mean(training_values, averaged, tmp_path):
    train_here(training_values, tmp_path / "last", **{**AVERAGED, "average_checkpoints": 0})
    last, mean = summary(tmp_path / "last"), summary(averaged)
    assert "averaged_steps" not in last
    assert mean["heldout"]["text.jsonl"] != last["heldout"]["text.jsonl"]
    config = build(TrainConfig, merged({**training_values, "output": "unused"}, AVERAGED))
    model = dynakv.attach(AutoModelForCausalLM.from_pretrained(training_values["model"]), averaged / "checkpoint")
    batches = heldout_blocks(config, AutoTokenizer.from_pretrained(training_values["model"]))["text.jsonl"]
    assert measure(model.eval(), batches) == mean["heldout"]["text.jsonl"]


def test_a_resumed_run_ends_with_the_same_mean(training_values, averaged, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(averaged, output)
    shutil.rmtree(output / "checkpoint")
    shutil.rmtree(output / "states/step-000008")
    train_here(training_values, output, resume=True, **AVERAGED)
    weights = "checkpoint/compressor.safetensors"
    assert (output / weights).read_bytes() == (averaged / weights).read_bytes()


def test_a_run_that_is_over_can_still_be_averaged(training_values, averaged, tmp_path):
    output = tmp_path / "run"
    train_here(training_values, output, **{**AVERAGED, "average_checkpoints": 0})
    shutil.rmtree(output / "checkpoint")
    train_here(training_values, output, resume=True, **AVERAGED)
    weights = "checkpoint/compressor.safetensors"
    assert (output / weights).read_bytes() == (averaged / weights).read_bytes()


def test_a_trained_backbone_is_averaged_too(training_values, tmp_path):
    output = tmp_path / "run"
    directory = train_here(
        training_values, output, trainable="full", **{**AVERAGED, "optimizer": {"lr_backbone": 1e-3}}
    )
    states = [load_file(output / f"states/step-{step:06d}/backbone.safetensors") for step in (4, 6, 8)]
    model = AutoModelForCausalLM.from_pretrained(directory)
    for name in states[0]:
        mean = torch.stack([state[name] for state in states]).double().mean(dim=0).float()
        torch.testing.assert_close(model.get_parameter(name).detach(), mean, atol=0, rtol=2e-7)


def test_a_damaged_state_is_left_out_with_a_warning(training_values, averaged, tmp_path, capfd):
    output = tmp_path / "run"
    shutil.copytree(averaged, output)
    shutil.rmtree(output / "checkpoint")
    damaged = output / "states/step-000006/compressor.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    train_here(training_values, output, resume=True, **AVERAGED)
    assert_is_mean(output, [4, 8])
    found = capfd.readouterr().err
    assert f"warning: {damaged.parent} is damaged and is left out of the mean: {damaged} does not have the che" in found
    assert "warning: `average_checkpoints` is 3, and the mean is of 2" in found


def test_older_states_do_not_count(training_values, tmp_path):
    changes = {"average_checkpoints": 2, "keep_checkpoints": 4}
    train_here(training_values, tmp_path / "run", **{**AVERAGED, **changes})
    assert len(list((tmp_path / "run/states").iterdir())) == 4
    assert_is_mean(tmp_path / "run", [6, 8])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"average_checkpoints": 4}, "`average_checkpoints` .* at most `keep_checkpoints`, 3"),
        ({"checkpoint_every": 4}, "`average_checkpoints` .* at most the 2 that `checkpoint_every` writes"),
        ({"checkpoint_every": 0}, "`average_checkpoints` .* at most the 0"),
        ({"average_checkpoints": -1}, "`average_checkpoints` .* zero or positive"),
    ],
)
def test_what_cannot_be_averaged_is_refused(training_values, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train_here(training_values, tmp_path / "run", **{**AVERAGED, **changes})
