"""One run on every engine: the same losses, and states that any other engine goes on from."""

import os
import shutil

import pytest
import yaml
from accelerate.commands.config import load_config_from_file
from safetensors.torch import load_file
from training_runs import (
    PLANNED,
    ROOT,
    STILL,
    assert_is_mean,
    assert_learned,
    launch,
    losses,
    merged,
    rows,
    summary,
    train_here,
)

from lowrank_kv.utils.errors import UserError

SHORT = {
    "optimizer": {"steps": 4, "batch_size": 4},
    "checkpoint_every": 2,
    "average_checkpoints": 2,
    "rate": {"target_retain_rate": 0.5, "gain": 0.0},
}
HALF = {
    "optimizer": {"steps": 4, "batch_size": 2},
    "checkpoint_every": 2,
    "average_checkpoints": 2,
    "rate": {"target_retain_rate": 0.5, "gain": 0.0},
}

# Between bf16 and fp32. The runs below differ by up to 7e-4, and by 3e-3 or more from those that do not learn or see half
# the batch.
BF16 = 2.5e-3


@pytest.fixture(scope="module")
def alone(training_values, tmp_path_factory):
    """The run that all others are compared with: one process, batches of four."""
    output = tmp_path_factory.mktemp("alone") / "run"
    train_here(training_values, output, **SHORT)
    return output


@pytest.fixture(scope="module")
def still(training_values, tmp_path_factory):
    """The same run with learning rates of zero."""
    output = tmp_path_factory.mktemp("still") / "run"
    train_here(training_values, output, **merged(SHORT, STILL))
    return output


@pytest.fixture(scope="module")
def sharded(training_values, tmp_path_factory):
    """The same run under ZeRO-3 on two processes."""
    pytest.importorskip("deepspeed")
    output = tmp_path_factory.mktemp("sharded") / "run"
    launch("zero3", 2, training_values, output, **HALF)
    return output


def forget_second_half(source, target):
    """A run as it was after step 2."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "states/step-000004")
    shutil.rmtree(target / "checkpoint")


def check(output, reference, kind, stage, tolerance):
    found = summary(output)
    assert (found["engine"]["type"], found["engine"]["zero_stage"], found["processes"]) == (kind, stage, 2)
    assert losses(output) == pytest.approx(losses(reference), rel=tolerance)
    assert found["calibrated_threshold"] == pytest.approx(summary(reference)["calibrated_threshold"], rel=1e-3)


def test_no_tolerance_here_is_as_wide_as_what_is_learned(alone, still):
    assert_learned(alone, still, BF16)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_configurations_of_accelerate_are_of_this_version(path):
    config = load_config_from_file(str(path))
    assert config.mixed_precision == "no"
    assert (config.distributed_type == "DEEPSPEED") == ("zero" in path.stem)
    if "zero" in path.stem:
        assert str(config.deepspeed_config["zero_stage"]) in path.stem


def test_a_process_takes_all_cores_though_accelerate_leaves_it_one(training_values, tmp_path):
    changes = {"optimizer": {"steps": 1, "batch_size": 1}, "threads": None}
    launch("plain", 1, training_values, tmp_path / "run", **changes)
    assert summary(tmp_path / "run")["threads"] == len(os.sched_getaffinity(0))


def test_deepspeed_that_shards_nothing_is_refused(training_values, tmp_path):
    with pytest.raises(AssertionError, match="DeepSpeed with `zero_stage: 0`, which shards nothing"):
        launch("zero0", 1, training_values, tmp_path / "run")


def test_processes_that_are_not_joined_are_refused(training_values, tmp_path, monkeypatch):
    """As on a machine without GPUs, which were asked for: both trained the whole run, and wrote over each other."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes were started, which accelerate did not join: .*USE_CPU=true"):
        train_here(training_values, tmp_path / "run")
    assert not (tmp_path / "run/checkpoint").exists()


def test_ddp(training_values, alone, tmp_path):
    launch("ddp", 2, training_values, tmp_path / "run", **HALF)
    check(tmp_path / "run", alone, "MULTI_CPU", 0, 1e-5)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2(training_values, alone, tmp_path, stage):
    pytest.importorskip("deepspeed")
    launch(f"zero{stage}", 2, training_values, tmp_path / "run", **HALF)
    check(tmp_path / "run", alone, "DEEPSPEED", stage, 1e-5)


def test_zero_3(alone, sharded):
    # Inputs of the first compressor require gradients there, so that keys are rotated by another function; AdamW's first
    # steps divide gradients by themselves and turn such rounding into steps.
    check(sharded, alone, "DEEPSPEED", 3, 3e-4)
    assert rows(sharded)[0]["loss"] == pytest.approx(rows(alone)[0]["loss"], rel=1e-6)


@pytest.mark.slow
def test_zero_3_recomputes_activations(training_values, sharded, still, tmp_path):
    """As the configurations of 8 B models do: a compressor is released, and gathered again for its second forward pass."""
    launch("zero3", 2, training_values, tmp_path / "run", gradient_checkpointing=True, **HALF)
    assert losses(tmp_path / "run") == pytest.approx(losses(sharded), rel=1e-5)
    launch("zero3", 2, training_values, tmp_path / "bf16", gradient_checkpointing=True, dtype="bfloat16", **HALF)
    assert losses(tmp_path / "bf16") == pytest.approx(losses(sharded), rel=BF16)
    assert_learned(tmp_path / "bf16", still, BF16)


# Gates that move fast give each process's text a rate of its own; rounding that ZeRO-3 brings in moves them, too.
FAST_GATES = {"optimizer": {"lr_gate": 0.02, "lr_gate_bias": 0.2}}


# Small steps, so that what ZeRO-3 rounds takes no token across the border of two ranks, whatever the processor sums in.
SMALL_STEPS = {"optimizer": {"lr_projection": 1e-4}}


@pytest.mark.parametrize(("engine", "tolerance", "changes"), [("ddp", 1e-5, FAST_GATES), ("zero3", 3e-4, SMALL_STEPS)])
def test_a_start_from_gradients_and_its_price(training_values, tmp_path, engine, tolerance, changes):
    """All processes begin at the first one's compressors and price, and the price answers to the rate of all of them. Under
    ZeRO-3 none of them has the whole model to take gradients of."""
    if engine == "zero3":
        pytest.importorskip("deepspeed")
    started = {"calibration": {"start": "gradient"}, "rate": {"gain": 20.0, "target_retain_rate": 0.42}, **changes}
    train_here(training_values, tmp_path / "alone", **merged(SHORT, started))
    launch(engine, 2, training_values, tmp_path / "run", **merged(HALF, started))
    pairs = list(zip(rows(tmp_path / "run"), rows(tmp_path / "alone"), strict=True))
    for found, expected in pairs:
        for name in ("loss", "hard_rate", "alpha"):
            assert found[name] == pytest.approx(expected[name], rel=tolerance)
    assert len({expected["alpha"] for _, expected in pairs}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_learned_classes_and_their_price(training_values, tmp_path, engine):
    """The price answers to what the tokens of all processes take. Sums in another order take a few coefficients across the
    border of two codes."""
    if engine == "zero3":
        pytest.importorskip("deepspeed")
    learned = merged(PLANNED, {"compressor": {"learned_classes": True}})
    learned |= {
        "rate": {"target_retain_rate": 0.12, "gain": 50.0},
        "optimizer": {"lr_projection": 1e-3, "lr_gate": 0.02},
    }
    train_here(training_values, tmp_path / "alone", **merged(SHORT, learned))
    train_here(training_values, tmp_path / "still", **merged(merged(SHORT, learned), STILL))
    launch(engine, 2, training_values, tmp_path / "run", **merged(HALF, learned))
    for found, expected in zip(rows(tmp_path / "run"), rows(tmp_path / "alone"), strict=True):
        for name in ("loss", "hard_rate", "alpha"):
            assert found[name] == pytest.approx(expected[name], rel=5e-3), name
    assert_learned(tmp_path / "run", tmp_path / "still", 5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_adapters_learn_from_the_model_without_them(training_values, tmp_path, engine):
    """Its pass switches adapters off and on beneath what joins the processes' gradients."""
    pytest.importorskip("peft")
    if engine != "ddp":
        pytest.importorskip("deepspeed")
    adapted = {**PLANNED, "trainable": "lora", "optimizer": {"lr_projection": 0.0, "lr_backbone": 1e-3}}
    train_here(training_values, tmp_path / "alone", **merged(SHORT, adapted))
    train_here(training_values, tmp_path / "still", **merged(merged(SHORT, adapted), STILL))
    launch(engine, 2, training_values, tmp_path / "run", **merged(HALF, adapted))
    for found, expected in zip(rows(tmp_path / "run"), rows(tmp_path / "alone"), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    states = [load_file(tmp_path / name / "full/model.safetensors") for name in ("still", "alone", "run")]
    adapters = [name for name in states[0] if "self_attn" in name and "kv_compressor" not in name]
    for name in adapters:
        start, one, two = (state[name] for state in states)
        assert float((one - start).norm()) > 0
        assert float((two - one).norm()) <= 1e-3 * float((one - start).norm()), name
    assert adapters


@pytest.mark.parametrize("name", ["redpajama-8b", "dynakv-paper"])
@pytest.mark.slow
def test_configurations_of_8b_models_on_a_tiny_one(training_values, text_file, tmp_path, name):
    """All they ask for at once: ZeRO-3, bf16, recomputed activations, text read in a stream by workers, a start from
    gradients, passes accumulated."""
    pytest.importorskip("deepspeed")
    values = yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())
    smaller = {
        "model": training_values["model"],
        "dataset": {"name": str(text_file), "text_field": "text", "heldout_share": 0.1, "sequence_length": 64}
        | {"divided_by": "blocks"},  # so that one process sees the same
        "calibration": {"tokens": 256},
        "optimizer": {"steps": 3},
        "heldout_blocks": 1,
        "checkpoint_every": 2,
    }
    launch("zero3", 2, merged(values, smaller), tmp_path / "run")
    plain = {"dtype": "float32", "gradient_checkpointing": False, "threads": 1}
    plain |= {"dataset": {"workers": 0}, "optimizer": {"batch_size": 2}}
    train_here(merged(merged(values, smaller), plain), tmp_path / "alone")
    train_here(merged(merged(values, smaller), plain), tmp_path / "still", **STILL)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=BF16)
    assert_learned(tmp_path / "run", tmp_path / "still", BF16)


def test_zero_3_ends_with_the_mean_of_its_states(sharded):
    assert_is_mean(sharded, [2, 4])


@pytest.mark.slow
def test_one_process_goes_on_from_a_sharded_state(training_values, sharded, tmp_path):
    forget_second_half(sharded, tmp_path / "run")
    train_here(training_values, tmp_path / "run", resume=True, **SHORT)
    assert losses(tmp_path / "run")[:2] == losses(sharded)[:2]
    assert losses(tmp_path / "run") == pytest.approx(losses(sharded), rel=3e-4)
    assert summary(tmp_path / "run")["processes"] == 1


@pytest.mark.slow
def test_sharded_processes_go_on_exactly(training_values, sharded, tmp_path):
    forget_second_half(sharded, tmp_path / "run")
    launch("zero3", 2, training_values, tmp_path / "run", "--resume", **HALF)
    assert losses(tmp_path / "run") == losses(sharded)
    weights = "checkpoint/compressor.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (sharded / weights).read_bytes()


@pytest.mark.slow
def test_zero_2_goes_on_from_one_process(training_values, alone, tmp_path):
    pytest.importorskip("deepspeed")
    forget_second_half(alone, tmp_path / "run")
    launch("zero2", 2, training_values, tmp_path / "run", "--resume", **HALF)
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-5)


def test_accumulated_passes_are_one_batch(training_values, alone, tmp_path):
    # Equal but for R², which is taken of each pass: α = 0 takes it out.
    for name, changes in {"whole": (4, 1), "parts": (1, 4)}.items():
        optimizer = {"steps": 3, "batch_size": changes[0], "gradient_accumulation_steps": changes[1]}
        train_here(training_values, tmp_path / name, rate={"alpha": 0.0}, optimizer=optimizer)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
