"""`lowrank-kv launch` ends as the command does that it starts: with one line."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from ready_python import program
from training_runs import SINGLE_THREAD

ROOT = Path(__file__).parents[2]


def launch(config: Path, python: str = sys.executable) -> subprocess.Popen:
    accelerate = ["--config_file", "configs/accelerate/single.yaml", "-m", "lowrank_kv_cli"]
    return subprocess.Popen(
        [python, "-m", "lowrank_kv_cli", "launch", *accelerate, "train", "--config", str(config)],
        cwd=ROOT,
        env={**SINGLE_THREAD, "PYTHON_EXEC": python},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has them, and what they start, ignore it.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def configuration(training_values, tmp_path, **changes) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**training_values, "output": str(tmp_path / "run"), **changes}))
    return path


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no groups of processes")
def test_ctrl_c_is_one_line(training_values, tmp_path):
    process = launch(configuration(training_values, tmp_path, optimizer={"steps": 10**6, "batch_size": 1}))
    metrics = tmp_path / "run/metrics.jsonl"
    for _ in range(1200):
        if metrics.exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error[-2000:]
    assert "Traceback" not in error
    assert error.splitlines().count("interrupted") == 1


def test_a_mistake_is_one_line(training_values, tmp_path):
    process = launch(configuration(training_values, tmp_path, seed=-1), python=program())
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "Traceback" not in error
    assert len([line for line in error.splitlines() if line.startswith("error: ")]) == 1
