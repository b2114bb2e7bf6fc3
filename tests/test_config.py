"""Strict configuration: what the YAML says, what the command line overrides, what is refused."""

import dataclasses

import pytest

from lowrank.config import build, parse_config
from lowrank.errors import UserError
from lowrank.paths import expand
from training.config import TrainConfig

ROOT_YAML = "model: somewhere\noptimizer:\n  steps: 7\n  lr_gate: 3e-3\n"


def parse(tmp_path, *arguments: str, text: str = ROOT_YAML) -> TrainConfig:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return parse_config(TrainConfig, ["--config", str(path), *arguments], description="")[0]


def test_file_then_command_line(tmp_path):
    chosen = ["--optimizer.steps", "9", "--rate.target_retain_rate", "0.3"]
    config = parse(tmp_path, *chosen, "--dataset.name", "a.txt,b.txt", "--dataset.weights", "[2, 1]")
    assert (config.optimizer.steps, config.optimizer.lr_gate) == (9, 3e-3)
    assert (config.dataset.name, config.dataset.weights) == (["a.txt", "b.txt"], [2, 1])
    assert config.rate.target_retain_rate == 0.3
    assert parse(tmp_path, "--dataset.heldout", "").dataset.heldout == []
    assert parse(tmp_path, "--rate.target_retain_rate", "null").rate.target_retain_rate is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\noptimizer:\n  stpes: 3\n", "unknown key `optimizer.stpes`.*did you mean `steps`"),
        ("model: m\nzebra: 3\n", "unknown key `zebra`.*valid keys: average_checkpoints"),
        ("optimizer:\n  steps: 3\n", "`model` is missing"),
        ("model: m\noptimizer:\n  steps: three\n", "`optimizer.steps` must be of type int, got 'three'"),
        ("model: m\noptimizer:\n  steps: 0\n", "`optimizer.steps` must be at least 1; got 0"),
        ("model: m\ncompressor:\n  gap: sideways\n", "`compressor.gap` must be one of hard.*got 'sideways'"),
        ("model: m\nrate:\n  target_retain_rate: 1.5\n", "target_retain_rate.*got 1.5"),
        ("model: m\noptimizer: 3\n", "`optimizer` must be a section"),
        ("model: [", "not valid YAML"),
        ("- 3\n", "must hold keys and values"),
        ("model: ${NO_SUCH_VARIABLE}/m\n", "NO_SUCH_VARIABLE, which is not set"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        parse(tmp_path, text=text)


def test_unknown_argument_names_the_nearest(tmp_path):
    with pytest.raises(UserError, match="--optimizer.step`; did you mean `optimizer.steps`"):
        parse(tmp_path, "--optimizer.step", "3")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere.yaml"):
        parse_config(TrainConfig, ["--config", str(tmp_path / "nowhere.yaml")], description="")


def test_home_expands(monkeypatch, tmp_path):
    monkeypatch.setenv("ADAPTIVE_KV_HOME", str(tmp_path))
    assert expand("${ADAPTIVE_KV_HOME}/model") == f"{tmp_path}/model"
    monkeypatch.setenv("ADAPTIVE_KV_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand("${ADAPTIVE_KV_HOME}/model") == f"{tmp_path}/.cache/adaptive-kv/model"


def test_configurations_are_frozen():
    config = build(TrainConfig, {"model": "m"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3


def test_help_lists_every_key_with_its_default(capsys):
    with pytest.raises(SystemExit):
        parse_config(TrainConfig, ["--help"], description="")
    text = " ".join(capsys.readouterr().out.split())

    def leaves(cls, prefix=""):
        for field in dataclasses.fields(cls):
            if field.metadata.get("section"):
                yield from leaves(field.default_factory, f"{prefix}{field.name}.")
            else:
                yield f"{prefix}{field.name}"

    for key in leaves(TrainConfig):
        assert f"--{key} " in text
    assert "in tokens [default 1024]" in text
