"""Settings that change nothing are told, whatever says otherwise, and those that do something are not."""

import pytest
import yaml
from training_runs import ROOT, merged, train_here

from dynakv.training_config import TrainConfig
from lowrank_kv.utils.config import build
from training.unused_settings import warn_of_unused_settings

TARGET = {"rate": {"target_retain_rate": 0.3}}
FIXED_PLAN = {"compressor": {"rank_policy": "plan", "learned_classes": False}}
LEARNED_PLAN = {"compressor": {"rank_policy": "plan"}}
ONE_CLASS = {"compressor": {"rank_policy": "plan", "token_classes": 1}}
NESTED = {"compressor": {"rank_policy": "nested"}, **TARGET}
THRESHOLDS = {"compressor": {"rank_policy": "soft_threshold"}, **TARGET}
GATES = {"compressor": {"rank_policy": "gate"}}
PRICE = {"rate": {"gain": 5.0, "ramp": 0.9}}
RATES = {"optimizer": {"lr_gate": 0.1, "lr_gate_bias": 0.1}}
CALIBRATION = {"rate": {"calibrate_threshold": False, "calibrate_threshold_tokens": 5}}
WHOLE, FEW = ["calibrate_threshold", "calibrate_threshold_tokens"], ["calibrate_threshold_tokens"]


@pytest.mark.parametrize(
    ("kind", "changes", "unused"),
    [
        (GATES, PRICE, ["gain", "ramp"]),
        (merged(GATES, TARGET), PRICE, []),
        (THRESHOLDS, PRICE, []),
        (NESTED, PRICE, ["gain", "ramp"]),
        (LEARNED_PLAN, PRICE, []),
        (FIXED_PLAN, PRICE, ["gain", "ramp"]),
        (GATES, RATES, []),
        (THRESHOLDS, RATES, ["lr_gate"]),
        (NESTED, RATES, ["lr_gate", "lr_gate_bias"]),
        (LEARNED_PLAN, RATES, ["lr_gate_bias"]),
        (FIXED_PLAN, RATES, ["lr_gate", "lr_gate_bias"]),
        (merged(GATES, TARGET), CALIBRATION, FEW),
        (merged(GATES, TARGET), {"rate": {"calibrate_threshold_tokens": 5}}, []),
        (GATES, {"rate": {"calibrate_threshold_tokens": 5}}, FEW),
        (THRESHOLDS, CALIBRATION, WHOLE),
        (NESTED, CALIBRATION, ["calibrate_threshold"]),
        (LEARNED_PLAN, CALIBRATION, []),
        (FIXED_PLAN, CALIBRATION, ["calibrate_threshold"]),
        (ONE_CLASS, CALIBRATION, WHOLE),
        (GATES, {"compressor": {"gate_decay": 40.0}}, []),
        (merged(GATES, TARGET), {"compressor": {"gate_decay": 40.0}}, ["gate_decay"]),
        (merged(GATES, TARGET), {"compressor": {"gate_decay": 40.0}, "calibration": {"start": "pca"}}, []),
        (GATES, {"compressor": {"gate_decay": 40.0}, "initial_checkpoint": "c"}, ["gate_decay"]),
        (GATES, {"optimizer": {"weight_decay": 0.1}}, ["weight_decay"]),
        (GATES, {"optimizer": {"weight_decay": 0.1}, "trainable": "full"}, []),
        (GATES, {"heldout_blocks": 32}, ["heldout_blocks"]),
        (GATES, {"heldout_blocks": 0}, []),
        (GATES, {"heldout_blocks": 32, "dataset": {"heldout_share": 0.1}}, []),
        (GATES, {"heldout_blocks": 32, "dataset": {"heldout": "h.jsonl"}}, []),
        (GATES, {"full_checkpoint": True}, []),
        (GATES, {"full_checkpoint": True, "trainable": "full"}, ["full_checkpoint"]),
        (GATES, {"full_checkpoint": True, "trainable": "lora"}, ["full_checkpoint"]),
        (GATES, {"keep_checkpoints": 9}, []),
        (GATES, {"keep_checkpoints": 9, "checkpoint_every": 0}, ["keep_checkpoints"]),
    ],
)
def test_settings_are_told_where_they_change_nothing(kind, changes, unused, recwarn):
    values = merged({"model": "m", "dataset": {"name": "text.jsonl"}}, merged(kind, changes))
    warn_of_unused_settings(build(TrainConfig, values))
    told = [str(each.message).partition("` is ")[0].strip("`").rpartition(".")[2] for each in recwarn]
    assert told == unused


def test_recipes_set_nothing_that_changes_nothing(monkeypatch, recwarn):
    monkeypatch.setenv("LOWRANK_KV_HOME", "home")
    recipes = [
        values
        for path in (ROOT / "configs").glob("*.yaml")
        if "optimizer" in (values := yaml.safe_load(path.read_text()))
    ]
    assert len(recipes) > 5
    for recipe in recipes:
        warn_of_unused_settings(build(TrainConfig, recipe))
    assert not list(recwarn)


def test_a_run_says_them_when_it_begins(training_values, tmp_path, recwarn):
    changes = {
        "compressor": {"token_classes": 2},
        "dataset": {"shuffle_buffer": 5, "heldout": None, "heldout_split": "x"},
    }
    train_here(training_values, tmp_path / "run", **changes, optimizer={"steps": 1, "lr_backbone": 1.0})
    found = [str(each.message).partition(" and changes nothing: it needs ") for each in recwarn]
    assert [(given, needed) for given, is_unused, needed in found if is_unused] == [
        ("`compressor.token_classes` is 2", "`compressor.rank_policy: plan`"),
        (
            "`rate.calibrate_threshold_tokens` is 1024",
            "gates with `rate.target_retain_rate` and `rate.calibrate_threshold`, nested ranks, or a plan of several "
            "classes",
        ),
        ("`optimizer.lr_backbone` is 1.0", "`trainable: lora` or `trainable: full`"),
        ("`dataset.shuffle_buffer` is 5", "`dataset.streaming: true`"),
        ("`dataset.heldout_split` is 'x'", "`dataset.heldout`"),
        ("`heldout_blocks` is 1", "`dataset.heldout` or `dataset.heldout_share`"),
    ]
