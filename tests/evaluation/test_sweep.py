"""Sweeps over targets, prices and recipes, and runs that train on from a checkpoint."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from ready_python import program
from safetensors.torch import load_file
from window_scores import score_windows

import dynakv
from evaluation.compare import row_of
from evaluation.page.points import points_of
from evaluation.sweep import SweepConfig, Variant, needs_of, points, sweep
from evaluation.texts import TextConfig, read_texts
from lowrank_kv.hf.loading import load_model, load_tokenizer
from lowrank_kv.utils import run_record
from lowrank_kv.utils.config import parse_config
from lowrank_kv.utils.errors import UserError
from ojakv import Calibration


def by_hand(settings, recipe, checkpoint) -> dict:
    """The row of a checkpoint, read window by window."""
    model, tokenizer = load_model(recipe["model"]), load_tokenizer(recipe["model"])
    texts = [TextConfig(**each) for each in settings["texts"]]
    [(label, windows)] = read_texts(texts, tokenizer, settings["block_length"], settings["blocks"]).items()
    maker = dynakv.DynaKVCache.maker(dynakv.attach(model, checkpoint))
    dynakv.detach(model)
    return row_of("dynakv", label, {label: score_windows(model, windows.ids_NT, maker, prefix=0)}, {label: windows})


def test_a_sweep_yields_a_curve_and_goes_on_where_it_stopped(run, here, mistake, four_steps, text_file, tmp_path):
    settings = {
        "train": str(four_steps),
        "targets": [0.9],
        "alphas": [4],
        "texts": [{"label": "text", "name": str(text_file)}],
        "calibration": {"name": str(text_file), "tokens": 256},
        "block_length": 64,
        "blocks": 2,
    }
    path, output = tmp_path / "sweep.yaml", tmp_path / "sweep"
    path.write_text(yaml.safe_dump(settings))
    environment = {**os.environ, "PYTHON_EXEC": program()}  # for the trainings that it starts
    done = run("sweep", "--config", path, "--output", output, env=environment)
    # The points of one recipe read the same, which is said once.
    told = [
        f"{reader} read `{text_file.name}`, which this run" for reader in ("the calibration", "`dynakv-target-0.9`")
    ]
    assert [done.stderr.count(each) for each in (*told, "which this run measures")] == [1, 1, 2]
    [path_of_first] = (output / "quality").iterdir()
    first = run_record.load(path_of_first)
    rows = first["rows"]
    assert rows[2] == by_hand(
        settings, yaml.safe_load(four_steps.read_text()), output / "points/dynakv-alpha-4/checkpoint"
    )
    assert [row["method"] for row in rows] == ["full", "dynakv", "dynakv"]
    keys = {"method", "dataset", "rate", "cache_bytes", "full_bytes", "perplexity", "perplexity_ratio", "kl", "top1"}
    assert all(keys < set(row) for row in rows)
    assert [done.stdout.count(f"| dynakv-{name} |") for name in ("target-0.9", "alpha-4")] == [1, 1]
    assert f"record: {path_of_first}" in done.stdout
    assert {point.label for point in points_of([first])} == {"full", "dynakv-target-0.9", "dynakv-alpha-4"}
    assert first["n"] == {"windows": 2, "tokens": 128}
    assert first["config"]["recipe"]["optimizer"]["steps"] == 4
    names = ["dynakv-target-0.9", "dynakv-alpha-4"]
    assert [each["name"] for each in first["inputs"] if each["role"] == "checkpoint"] == names
    points = {path.name: path for path in (output / "points").iterdir()}
    assert points.keys() == {"dynakv-target-0.9", "dynakv-alpha-4"}
    # Both start from the bases beside them, not from their own.
    for point in points.values():
        assert yaml.safe_load((point / "config.yaml").read_text())["calibration"]["bases"] == str(output / "bases")
    # As if the sweep had been stopped before the second point was measured: it alone is measured again, not trained.
    cells = output / "cells.jsonl"
    *others, last = cells.read_text().splitlines(keepends=True)
    assert len(others) == 5
    cells.write_text("".join(others))
    trained = {name: (point / "checkpoint/config.json").stat().st_mtime_ns for name, point in points.items()}
    here("sweep", "--config", path, "--output", output)
    [path_of_second] = {*(output / "quality").iterdir()} - {path_of_first}
    second = run_record.load(path_of_second)
    assert run_record.load(path_of_first) == first
    assert second["rows"] == rows
    by = {
        name: {each["run_id"]: each["cells"] for each in runs}
        for name, runs in second["summary"]["measured_by"].items()
    }
    ids = first["run_id"], second["run_id"]
    assert by == {"full": {ids[0]: 2}, names[0]: {ids[0]: 2}, names[1]: dict.fromkeys(ids, 1)}
    assert {name: (point / "checkpoint/config.json").stat().st_mtime_ns for name, point in points.items()} == trained
    # Other windows are measured without a training.
    here("sweep", "--config", path, "--output", output, "--blocks", "1")
    assert len(cells.read_text().splitlines()) == 6
    assert {name: (point / "checkpoint/config.json").stat().st_mtime_ns for name, point in points.items()} == trained
    # The same directory by another name.
    here("sweep", "--config", path, "--output", output / ".." / output.name, "--blocks", "1")
    assert {name: (point / "checkpoint/config.json").stat().st_mtime_ns for name, point in points.items()} == trained
    # A training run that says something else than when the sweep was begun.
    four_steps.write_text(yaml.safe_dump({**yaml.safe_load(four_steps.read_text()), "seed": 5}))
    assert "begun with other settings" in mistake("sweep", "--config", path, "--output", output)


def test_a_run_trains_on_from_a_checkpoint(here, mistake, four_steps, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    target = ("--rate.target_retain_rate", "0.9", "--rate.calibrate_threshold", "false")
    here("train_dynakv.py", "--config", four_steps, "--output", first, *target)
    learned_nothing = [f"--optimizer.lr_{name}=0" for name in ("projection", "gate", "gate_bias")]
    start = ("--initial_checkpoint", first / "checkpoint")
    here("train_dynakv.py", "--config", four_steps, "--output", second, *start, *target, *learned_nothing)
    last = json.loads((first / "checkpoint/config.json").read_text())["summary"]["alpha"]
    assert json.loads((second / "metrics.jsonl").read_text().splitlines()[0])["alpha"] == last != 4.0
    weights = [load_file(output / "checkpoint/compressor.safetensors") for output in (first, second)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name
    for argument, message in {
        "--compressor.decoder=orthogonal": "`compressor.decoder` is 'orthogonal', and the checkpoint",
        "--calibration.bases=somewhere": "`initial_checkpoint` must be null where `calibration.bases` is given",
    }.items():
        refused = ("train_dynakv.py", "--config", four_steps, "--output", tmp_path / "third", *start, argument)
        assert message in mistake(*refused)
        assert not (tmp_path / "third/checkpoint").exists()


ROOT = Path(__file__).parents[2]
OUTPUT = Path("out")


@pytest.fixture
def sweep_of(tmp_path):
    """The configuration of a sweep whose training run has a model, a text and the given sections."""

    def made(recipe=None, **options) -> SweepConfig:
        path = tmp_path / "train.yaml"
        path.write_text(yaml.safe_dump({"model": "m", "dataset": {"name": "text.txt"}} | (recipe or {})))
        return SweepConfig(train=str(path), texts=[TextConfig(label="t", name="t")], **options)

    return made


def with_policy(policy: str) -> dict:
    return {"compressor": {"rank_policy": policy}}


def test_a_sweep_says_when_its_recipe_has_no_model(sweep_of, tmp_path):
    config = sweep_of(with_policy("gate"), targets=[0.5])
    Path(config.train).write_text("optimizer:\n  steps: 3\n")
    with pytest.raises(
        UserError, match="the run `dynakv-target-0.5` of the sweep: `model` is missing from .*train.yaml"
    ):
        sweep(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sweep_refuses_a_run_that_could_not_be_trained_before_it_begins(sweep_of, tmp_path):
    misspelt = Variant(label="other", arguments=["--compressor.decodr", "orthogonal"])
    config = sweep_of(with_policy("gate"), targets=[0.5], variants=[Variant(label="one"), misspelt])
    with pytest.raises(UserError, match="the run `other-target-0.5` of the sweep: unknown argument .*decodr"):
        sweep(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["targets", "alphas"])
def test_points_of_one_name_are_refused(sweep_of, key):
    """They would be trained in one directory."""
    with pytest.raises(UserError, match=f"`{key}` must be numbers that differ in their first six digits; got"):
        sweep_of(**{key: [0.5, 0.25, 0.50000001]})


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("sweep-*.yaml")), ids=lambda path: path.stem)
def test_every_run_of_our_sweeps_could_be_trained(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LOWRANK_KV_HOME", "home")
    config, _ = parse_config(SweepConfig, ["--config", str(path)], description="")
    names = [point.name for point in points(config, OUTPUT)]
    assert len(set(names)) == max(1, len(config.variants)) * len(config.targets)


def test_points_of_a_staged_sweep_train_on_from_each_other(sweep_of):
    def starts(config) -> list[tuple[str, str | None, str | None]]:
        runs = points(config, OUTPUT)
        return [(each.name, each.run.calibration.bases, each.run.initial_checkpoint) for each in runs]

    recipes = [Variant(label="exact"), Variant(label="other", arguments=["--compressor.decoder", "decoupled"])]
    # Whatever the run's own file says, a point starts from one of the two.
    recipe = with_policy("gate") | {"calibration": {"bases": "mine"}, "initial_checkpoint": "earlier"}
    config = sweep_of(recipe, targets=[0.5, 0.3], alphas=[4], staged=True, variants=recipes)
    assert starts(config) == [
        ("exact-target-0.5", "out/bases", None),
        ("exact-target-0.3", None, "out/points/exact-target-0.5/checkpoint"),
        ("exact-alpha-4", None, "out/points/exact-target-0.3/checkpoint"),
        ("other-target-0.5", "out/bases", None),
        ("other-target-0.3", None, "out/points/other-target-0.5/checkpoint"),
        ("other-alpha-4", None, "out/points/other-target-0.3/checkpoint"),
    ]
    assert all(each[1:] == ("out/bases", None) for each in starts(dataclasses.replace(config, staged=False)))


def test_a_sweep_knows_what_its_calibration_must_have(sweep_of):
    def needs(recipe=None, **options) -> list[str]:
        found = needs_of(points(sweep_of(with_policy("gate") | (recipe or {}), prefix=64, **options), OUTPUT))
        return [key for key, needed in found.items() if needed]

    plain = Variant(label="plain")
    weighted = Variant(label="weighted", arguments=["--calibration.start=gradient"])
    unweighted = Variant(label="unweighted", arguments=["--calibration.start", "pca"])
    gated = Variant(label="gated", arguments=["--compressor.rank_policy", "gate"])
    orthogonal = Variant(label="orthogonal", arguments=["--compressor.decoder", "orthogonal"])
    # Where nothing is said, runs that have a target and can start from gradients.
    assert needs(targets=[0.5]) == ["gradients"]
    assert needs(alphas=[4.0]) == []
    assert needs(targets=[0.5], variants=[orthogonal, unweighted]) == []
    assert needs(targets=[0.5], variants=[unweighted, weighted]) == ["gradients"]
    nested = Variant(label="nested", arguments=["--compressor.rank_policy", "nested"])
    for variant, why in ((weighted, "`calibration.start` is gradient"), (nested, "`compressor.rank_policy` is nested")):
        named = f"the run `{variant.label}-alpha-4` of the sweep: `rate.target_retain_rate` must be given where {why}"
        with pytest.raises(UserError, match=named):
            needs(alphas=[4.0], variants=[plain, variant])
    assert needs(with_policy("nested"), targets=[0.5]) == []
    weighs = {"calibration": {"start": "gradient"}}
    assert needs(weighs, targets=[0.5]) == ["gradients"]
    assert needs(with_policy("plan"), targets=[0.5]) == ["read"]
    assert needs(with_policy("plan"), targets=[0.5], variants=[plain, gated]) == ["gradients", "read"]
    assert needs(weighs, alphas=[4.0], variants=[unweighted]) == []
    joint = Variant(label="joint", arguments=["--compressor.joint_layers", "2"])
    assert needs(with_policy("plan"), targets=[0.5], variants=[plain, joint]) == ["read", "joint_layers"]


@pytest.mark.parametrize("flag", ["--compressor.rank_policy", "--compressor.rank-policy"])
def test_arguments_of_a_variant_are_read_as_training_reads_them(sweep_of, flag):
    plan = sweep_of(with_policy("plan"), alphas=[4.0], prefix=64)
    with pytest.raises(UserError, match="`alphas` must be left out where a plan of bits is learned .dynakv.*got .4.0."):
        points(plan, OUTPUT)
    gated = dataclasses.replace(plan, variants=[Variant(label="gated", arguments=[flag, "gate"])])
    [point] = points(gated, OUTPUT)
    assert point.run.compressor.rank_policy == "gate"
    nested = sweep_of(
        with_policy("gate"), targets=[0.5], variants=[Variant(label="nested", arguments=[flag, "nested"])]
    )
    assert not any(needs_of(points(nested, OUTPUT)).values())


@pytest.mark.parametrize("compressor", [{"rank_policy": "gate", "prefill": "exact"}, {"rank_policy": "plan"}, {}])
def test_exact_prompts_are_not_scored_in_one_pass(sweep_of, compressor):
    config = sweep_of({"compressor": compressor}, targets=[0.5])
    with pytest.raises(UserError, match="`prefix` must be above 0 with exact prompts"):
        points(config, OUTPUT)


def test_plans_of_bits_are_not_staged(sweep_of):
    config = sweep_of(targets=[0.5, 0.3], staged=True, prefix=64)
    with pytest.raises(UserError, match="`staged` must be false with plans of bits"):
        points(config, OUTPUT)


def test_a_backbone_is_not_trained_in_a_sweep(sweep_of):
    config = sweep_of(with_policy("gate") | {"trainable": "lora"}, targets=[0.5])
    with pytest.raises(UserError, match="`trainable` must be compressor in a sweep"):
        points(config, OUTPUT)


def with_joint(label: str, layers: int) -> Variant:
    return Variant(label=label, arguments=["--compressor.joint_layers", str(layers)])


def test_points_that_code_other_numbers_of_layers_together_share_no_calibration(sweep_of):
    variants = [Variant(label="plain"), with_joint("two", 2), with_joint("three", 3)]
    config = sweep_of(with_policy("plan"), targets=[0.5], prefix=64, variants=variants)
    named = r"`compressor.joint_layers` must be one number beside 0: .* another --output; got '2 .two., 3 .three.'"
    with pytest.raises(UserError, match=named):
        points(config, OUTPUT)
    assert len(points(dataclasses.replace(config, variants=variants[:2]), OUTPUT)) == 2


def test_a_sweep_calibrates_for_as_many_layers_as_its_points_code_together(here, tmp_path, text_file, training_values):
    recipe = {
        **training_values,
        "heldout_blocks": 0,
        "compressor": {"rank_policy": "plan", "joint_layers": 2, "token_classes": 1},
        "calibration": {},
        "optimizer": {"steps": 1, "batch_size": 1},
        "dataset": {"name": str(text_file), "sequence_length": 128},
    }
    settings = {
        "train": str(tmp_path / "train.yaml"),
        "targets": [0.3],
        "texts": [{"label": "text", "name": str(text_file)}],
        "calibration": {"name": str(text_file), "tokens": 1024, "length": 128},
        "block_length": 128,
        "prefix": 64,
        "blocks": 1,
    }
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(settings))
    here("sweep", "--config", tmp_path / "sweep.yaml", "--output", tmp_path / "sweep")
    assert Calibration.load(tmp_path / "sweep/bases").joint_layers == 2
    [path] = (tmp_path / "sweep/quality").iterdir()
    assert [row["method"] for row in run_record.load(path)["rows"]] == ["full", "dynakv"]
    assert json.loads((tmp_path / "sweep/calibration.json").read_text())["joint_layers"] == 2
