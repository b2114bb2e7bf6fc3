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


SINGLE = ("--config_file", "configs/accelerate/single.yaml")
TWO = ("--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no")


def launch(config: Path, options=SINGLE, python: str = sys.executable) -> subprocess.Popen:
    return subprocess.Popen(
        [python, "-m", "lowrank_kv_cli", "launch", *options, "-m", "lowrank_kv_cli", "train", "--config", str(config)],
        cwd=ROOT,
        env={**SINGLE_THREAD, "PYTHON_EXEC": python, "ACCELERATE_USE_CPU": "true"},
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
@pytest.mark.parametrize("options", [SINGLE, TWO], ids=["one", "two"])
def test_ctrl_c_is_one_line(training_values, tmp_path, options):
    process = launch(configuration(training_values, tmp_path, optimizer={"steps": 10**6, "batch_size": 1}), options)
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


@pytest.mark.parametrize("options", [SINGLE, TWO], ids=["one", "two"])
def test_a_mistake_is_one_line(training_values, tmp_path, options):
    process = launch(configuration(training_values, tmp_path, seed=-1), options, python=program())
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "Traceback" not in error
    assert len([line for line in error.splitlines() if line.startswith("error: ")]) == 1


def test_an_end_that_is_no_mistake_names_its_process():
    command = [sys.executable, "-m", "lowrank_kv_cli", "launch", *TWO, "-m", "no_such_module"]
    done = subprocess.run(command, cwd=ROOT, env=SINGLE_THREAD, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "ended with status 1, and the launcher ended the others" in done.stderr
    assert "Traceback" not in done.stderr
