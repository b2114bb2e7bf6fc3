"""Whoever has only `--help` gets on: it names what can be given, and its examples are ones that work without a checkout."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ready_python import program

import evaluation.compare_command
import evaluation.hypothesis.command
import evaluation.sweep_command
import evaluation.tasks.command
from dynakv.training_config import TrainConfig
from evaluation.compare import CompareConfig
from evaluation.hypothesis.config import HypothesisConfig
from evaluation.peers import PEERS
from evaluation.sweep import SweepConfig, points
from evaluation.tasks.registry import NAMES
from evaluation.tasks.run import TasksConfig
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from lowrank_kv_cli import __main__ as cli
from ojakv import PRESETS

ROOT = Path(__file__).parents[2]


def help_of(name: str, capsys, monkeypatch) -> str:
    monkeypatch.setattr(sys, "argv", ["lowrank-kv", name, "--help"])
    with pytest.raises(SystemExit):
        cli.dispatch([name, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("generate", PRESETS),
        ("inspect", PRESETS),
        ("compare", (*PRESETS, *PEERS)),
        ("tasks", (*PRESETS, *PEERS, *NAMES)),
    ],
)
def test_every_name_that_can_be_given_stands_there_whole(name, words, capsys, monkeypatch):
    text = help_of(name, capsys, monkeypatch)
    assert [word for word in words if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text)] == []


def examples_of(text: str) -> list[str]:
    """Commands of ours that a help text shows, with the lines that continue them."""
    return re.findall(r"^    lowrank-kv (?:.*\\\n)*.*$", text, re.M)


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_no_example_needs_a_file_of_a_checkout(name):
    doc = importlib.import_module(cli.COMMANDS[name][0]).__doc__
    assert examples_of(doc)
    for example in examples_of(doc):
        assert not re.search(r"configs/|scripts/|\.py\b|runs/demo|constraints", example), example


def configurations_of(doc: str) -> dict[str, str]:
    """Files that a help text shows: name → YAML."""
    found = re.findall(r"in (\w+\.yaml):\n\n((?:    .*\n)+)", doc)
    return {name: "\n".join(line[4:] for line in text.splitlines()) for name, text in found}


@pytest.mark.parametrize(
    ("module", "file", "config"),
    [
        (evaluation.compare_command, "compare.yaml", CompareConfig),
        (evaluation.tasks.command, "tasks.yaml", TasksConfig),
        (evaluation.hypothesis.command, "hypothesis.yaml", HypothesisConfig),
    ],
)
def test_the_configurations_that_are_shown_are_valid(module, file, config):
    values = yaml.safe_load(configurations_of(module.__doc__)[file])
    assert build(config, values).model == "MODEL"


def test_the_sweep_that_is_shown_has_valid_runs(tmp_path, monkeypatch):
    shown = configurations_of(evaluation.sweep_command.__doc__)
    (tmp_path / "train.yaml").write_text(shown["train.yaml"])
    monkeypatch.chdir(tmp_path)
    config = build(SweepConfig, yaml.safe_load(shown["sweep.yaml"]))
    runs = points(config, tmp_path / "out")
    assert [point.run.rate.target_retain_rate for point in runs] == config.targets
    assert isinstance(runs[0].run, TrainConfig)


def test_a_preset_is_checked_before_the_model_is_loaded(tmp_path):
    (tmp_path / "moments.safetensors").touch()  # looks like a calibration
    command = ["generate", "--model", "./nowhere", "--bases", str(tmp_path), "--prompt", "x"]
    with pytest.raises(UserError, match="unknown preset `x`"):
        cli.dispatch([*command, "--preset", "x"])
    with pytest.raises(UserError, match=r"`rate` must be .*; got 7"):
        cli.dispatch([*command, "--preset", "ojakv-pf", "--rate", "7"])


def started(*words: object, python: str | None = None) -> subprocess.CompletedProcess:
    command = [python or program(), "-m", "lowrank_kv_cli", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_launch_without_a_command_says_so_in_a_few_lines():
    done = started("launch")
    assert done.returncode == 2
    assert "-m lowrank_kv_cli COMMAND" in done.stderr
    assert len(done.stderr.splitlines()) < 5


def test_lm_eval_describes_our_model_too():
    assert "--model_args pretrained=MODEL,preset=" in started("lm-eval", "--help").stdout


def test_lm_eval_is_described_where_it_is_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    with pytest.raises(UserError, match=r"needs the package `lm-eval`; install it with `pip install lm-eval`"):
        cli.dispatch(["lm-eval", "--help"])
    assert "--model_args pretrained=MODEL,preset=" in capsys.readouterr().out


def test_what_is_missing_is_named_with_two_ways_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    words = importlib.import_module("evaluation.tasks.longbench.metrics")
    with pytest.raises(UserError, match=r"`pip install jieba`, or in a checkout with .* '\.\[eval\]'`"):
        words._chinese_words("一")


def test_a_file_gets_no_bars_of_loading(tiny_dir, text_file, tmp_path):
    text = ("--name", text_file, "--tokens", 256, "--length", 64)
    # An interpreter that has not imported yet who draws them.
    done = started("calibrate", "--model", tiny_dir, *text, "--output", tmp_path / "bases", python=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "Loading weights" not in done.stderr
    assert "Filter" not in done.stderr
    assert "calibrating" in done.stderr  # our own say what takes minutes
