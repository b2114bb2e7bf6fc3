"""A training that is killed at random moments, again and again, ends as one that was left alone. KILLS: how many times."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from training_runs import SINGLE_THREAD, losses, merged, train_here

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS", "5"))
CHANGES = {"checkpoint_every": 1, "optimizer": {"steps": 12, "batch_size": 2}}
# Ends itself so long after the model is ready: while it calibrates, takes steps, writes a state or the final checkpoint.
CODE = """
import os, signal, sys, threading
from lowrank_kv.utils import cli
from training import command, loop
prepare, delay = loop._prepare, float(sys.argv.pop())
def ready(*arguments):
    if delay:
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    return prepare(*arguments)
loop._prepare = ready
cli.run(command.main)
"""


def start(config: Path, output: Path, delay: float) -> int:
    resume = ["--resume"] if list((output / "states").glob("step-*")) else []
    done = subprocess.run(
        [sys.executable, "-c", CODE, "--config", str(config), *resume, str(delay)],
        cwd=ROOT,
        env=SINGLE_THREAD,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


@pytest.mark.slow
def test_killed_again_and_again_it_ends_as_if_it_were_not(training_values, tmp_path):
    train_here(training_values, tmp_path / "whole", **CHANGES)
    expected = (tmp_path / "whole/checkpoint/compressor.safetensors").read_bytes()
    config, output = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(merged({**training_values, "output": str(output)}, CHANGES)))
    draw, killed, ended = random.Random(0), 0, 0

    def check_the_end() -> None:
        assert losses(output) == losses(tmp_path / "whole")
        assert (output / "checkpoint/compressor.safetensors").read_bytes() == expected
        shutil.rmtree(output)

    while killed < KILLS and ended < 3 * KILLS:  # a run that ended before its kill came is another case
        if start(config, output, draw.uniform(0.02, 0.9)):
            killed += 1
        else:
            ended += 1
            check_the_end()
    assert killed >= min(KILLS, 2), "some kills must have come in time"
    if output.exists():
        assert start(config, output, 0.0) == 0
        check_the_end()
