"""Shared fixtures: a tiny model directory with a byte tokenizer, and the demo model."""

import gc
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from byte_tokenizer import byte_tokenizer
from filelock import FileLock
from hypothesis import settings
from ready_python import program
from transformers import LlamaConfig, LlamaForCausalLM

from lowrank_kv.utils import paths
from lowrank_kv_cli.__main__ import COMMANDS

ROOT = Path(__file__).parent.parent

# The tiny models' operations are far too small to be worth a second thread, and the demo model's would wait for those of
# another worker. Processes that tests start inherit this. `make sanitize` looks for races of several threads.
torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))
os.environ["OMP_NUM_THREADS"] = "1"

# As in an activated environment: quanto's extension is built anew, for half a minute, wherever another ninja built it.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


# A shell's background jobs ignore Ctrl-C, and so would all processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Always the same examples, which a busy machine may be slow at: what passes here passes everywhere. With
# HYPOTHESIS_PROFILE=default each run draws others, as `make fuzz` does.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_collection_finish() -> None:
    """From here on collections of garbage leave out what was imported and collected, which takes them half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """A two-layer Llama with random weights, saved with a byte tokenizer."""
    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """A few kilobytes of text as .jsonl."""
    import json

    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    words = [
        "the",
        "cache",
        "keeps",
        "what",
        "later",
        "tokens",
        "will",
        "ask",
        "for",
        "and",
        "lets",
        "the",
        "rest",
        "go",
    ]
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 60)) for i in range(1, 30)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def training_values(tiny_dir, text_file) -> dict:
    """The configuration of a training run of eight short steps, without its output. It neither measures what the machine can
    do nor reads 16,384 tokens for its threshold, which together would take twice as long as all its steps."""
    return {
        "model": str(tiny_dir),
        "dtype": "float32",
        "threads": 1,
        "checkpoint_every": 4,
        "heldout_blocks": 1,
        "dataset": {"name": str(text_file), "heldout": str(text_file), "sequence_length": 64},
        "calibration": {"start": "pca", "tokens": 256},
        "compressor": {"rank_policy": "gate", "granularity": 4},
        "optimizer": {"steps": 8, "batch_size": 2},
        "rate": {"calibrate_threshold_tokens": 1024},
        "report": {"peak_flops": 1e12},
    }


@pytest.fixture(scope="session")
def checkpoint(tiny_dir, tmp_path_factory) -> Path:
    """A compressor of the tiny model whose ranks differ from token to token, without the time it takes to train one."""
    from methods import spread_gates

    import dynakv
    from lowrank_kv.calibration.activation_moments import calibrate
    from lowrank_kv.hf.loading import load_model

    model = load_model(str(tiny_dir))
    moments = calibrate(model, torch.randint(1, 257, (4, 64)), progress=False)
    dynakv.add_compressors(model, dynakv.DynaKVConfig(granularity=1))
    dynakv.initialize_from_moments(model, moments)
    spread_gates(model)
    directory = tmp_path_factory.mktemp("trained") / "checkpoint"
    dynakv.save_compressor(model, directory)
    return directory


@pytest.fixture
def four_steps(training_values, tmp_path) -> Path:
    """The configuration file of a training run of four steps that inspects its layers and calibrates its threshold."""
    values = {
        **training_values,
        "output": str(tmp_path / "run"),
        "checkpoint_every": 2,
        "optimizer": {"steps": 4, "batch_size": 2},
        "report": {"inspect_every": 2, "sentence": "the cache keeps | what", "peak_flops": 1e12},
        "rate": {"calibrate_threshold_tokens": 128},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def without_gradients() -> Iterator[None]:
    """For every test of a file: ``pytestmark = pytest.mark.usefixtures("without_gradients")``."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The demo model, fetched on first use with the texts beside it."""
    home = paths.home()
    directory, fetched_last = home / "SmolLM2-135M-Instruct", home / "text/articles.jsonl"
    home.mkdir(parents=True, exist_ok=True)
    # Tests run in several processes, of which one fetches. Both waits end before pytest ends the test, so as to be named.
    with FileLock(home / "fetching.lock", timeout=800):
        if not (directory.is_dir() and fetched_last.is_file()):
            subprocess.run([sys.executable, str(ROOT / "scripts/fetch_demo_assets.py")], check=True, timeout=700)
    return directory


@pytest.fixture(scope="session")
def run():
    """Run a command of `lowrank-kv`, or what Python is to run, as a user would; returns the finished process with its text
    output."""

    def call(*command: object, check: bool = True, **kwargs) -> subprocess.CompletedProcess:
        words = [program(), *(("-m", "lowrank_kv_cli") if command[0] in COMMANDS else ()), *map(str, command)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600, **kwargs)
        if check:
            assert done.returncode == 0, done.stderr[-3000:]
        return done

    return call


@pytest.fixture
def here(capsys, monkeypatch):
    """Run a command of `lowrank-kv`, or a script, within this process; returns its standard output. Starting a process costs
    seconds, most of them imports; each command has a test with :func:`run`, too."""

    def call(command: str, *arguments: object) -> str:
        monkeypatch.chdir(ROOT)
        is_command = command in COMMANDS
        monkeypatch.setattr(sys, "argv", [command, *([command] if is_command else []), *map(str, arguments)])
        if is_command:
            runpy.run_module("lowrank_kv_cli", run_name="__main__")
        else:
            runpy.run_path(str(ROOT / command), run_name="__main__")
        return capsys.readouterr().out

    return call


@pytest.fixture
def mistake(here, capsys):
    """The same for a command that must end as a user's mistake does: with status 2 and one paragraph on standard error,
    which is returned."""

    def call(command: str, *arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            here(command, *arguments)
        assert ended.value.code == 2
        [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        return error

    return call
