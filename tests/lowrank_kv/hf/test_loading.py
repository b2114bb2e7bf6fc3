"""What a model is loaded in where that is left to the machine, and what is not loaded."""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from training_runs import train_here

from lowrank_kv.hf.loading import AUTO, dtype_for, load_model
from lowrank_kv.utils import run_record
from lowrank_kv.utils.errors import UserError
from lowrank_kv_cli import calibrate, generate
from lowrank_kv_cli.__main__ import dispatch

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
CHOSEN = pytest.mark.parametrize(("capability", "expected"), [("AVX2", "float32"), ("AVX512", "bfloat16")])


@pytest.fixture
def processor(monkeypatch):
    def is_now(capability: str) -> None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    return is_now


@CHOSEN
def test_auto_is_bf16_where_the_processor_multiplies_it(processor, capability, expected):
    processor(capability)
    with warnings.catch_warnings(action="error"):
        assert dtype_for(AUTO, CPU) == expected
        assert dtype_for("float32", CPU) == "float32"


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_on_a_gpu(monkeypatch, processor, has_bf16, expected):
    processor("AVX2")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16 or including_emulation)
    assert dtype_for(AUTO, torch.device("cuda")) == expected


def test_a_slow_dtype_is_told_and_used(processor):
    processor("AVX2")
    with pytest.warns(UserWarning, match="`dtype` is bfloat16, .* give `auto`, or float32"):
        assert dtype_for("bfloat16", CPU) == "bfloat16"
    processor("AVX512")
    with warnings.catch_warnings(action="error"):
        assert dtype_for("bfloat16", CPU) == "bfloat16"


@CHOSEN
def test_a_training_computes_and_is_recorded_in_what_auto_came_to(
    processor, training_values, tmp_path, capability, expected
):
    processor(capability)
    train_here(training_values, tmp_path / "run", dtype=AUTO, optimizer={"steps": 2})
    [path] = (tmp_path / "run/training").iterdir()
    assert run_record.load(path)["config"]["dtype"] == expected


@CHOSEN
def test_commands_load_what_auto_comes_to(
    processor, tiny_dir, text_file, tmp_path, monkeypatch, capsys, capability, expected
):
    processor(capability)
    loaded = []
    for command in (calibrate, generate):
        original = command.load_model
        monkeypatch.setattr(
            command,
            "load_model",
            lambda *words, load=original, **told: loaded.append(told["dtype"]) or load(*words, **told),
        )
    model, bases = ["--model", str(tiny_dir)], str(tmp_path / "bases")
    dispatch(["calibrate", *model, "--name", str(text_file), "--tokens", "512", "--length", "64", "--output", bases])
    dispatch(["generate", *model, "--bases", bases, "--prompt", "the cache", "--max-new-tokens", "2"])
    assert loaded == [expected, expected]
    assert "--dtype" not in capsys.readouterr().out  # a next command has the same default


def test_weights_that_are_cut_off_are_one_sentence(tiny_dir, tmp_path):
    directory = shutil.copytree(tiny_dir, tmp_path / "model")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(UserError, match=rf"cannot load `{directory}`: "):
        load_model(str(directory))


def test_a_model_that_brings_code_along_is_refused_and_asks_nothing(tmp_path):
    """Standard input may belong to a script's own pipe."""
    (tmp_path / "code.py").write_text("raise SystemExit('this ran')\n")
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "a_new_one", "auto_map": classes}))
    code = f"from lowrank_kv.hf.loading import load_model; load_model({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, input="y\n" * 9, capture_output=True, text=True, timeout=300
    )
    assert "UserError: cannot load" in done.stderr
    assert "this ran" not in done.stderr
    assert not done.stdout
