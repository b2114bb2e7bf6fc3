"""A training that is killed at random moments, again and again, ends as one that was left alone. KILLS: how many times."""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from training_runs import SINGLE_THREAD, launch, launched, losses, merged, train_here

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS", "5"))
CHANGES = {"checkpoint_every": 1, "optimizer": {"steps": 12, "batch_size": 2}}
PROCESSES = 2
OF_EACH = merged(CHANGES, {"optimizer": {"batch_size": 2 // PROCESSES}})
# Ends a process so long after its model is ready: while it calibrates, takes steps, writes a state or the final checkpoint.
CODE = """
import os, signal, sys, threading
from lowrank_kv.utils import cli
from training import command, loop
prepare, rank, delay = loop._prepare, int(sys.argv.pop()), float(sys.argv.pop())
def ready(*arguments):
    if delay and int(os.environ.get("RANK", "0")) == rank:
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    return prepare(*arguments)
loop._prepare = ready
cli.run(command.main)
"""


def resume(output: Path) -> list[str]:
    return ["--resume"] if list((output / "states").glob("step-*")) else []


def kill_and_go_on(start: Callable[[float], bool], seconds: float, whole: Path, output: Path) -> None:
    """Kill a run until it was killed KILLS times, and compare it with the `whole` one whenever it comes to its end.

    Args:
        start: starts or resumes the run, kills it after the given seconds (0 never kills it), and returns whether the kill
            came before its end.
        seconds: at most; fewer and fewer where a run ends before.
    """
    random_ = random.Random(0)
    expected, killed, ended = (whole / "checkpoint/compressor.safetensors").read_bytes(), 0, 0

    def check_the_end() -> None:
        assert losses(output) == losses(whole)
        assert (output / "checkpoint/compressor.safetensors").read_bytes() == expected
        shutil.rmtree(output)

    while killed < KILLS and ended < 3 * KILLS:  # a run that ended before its kill came is another case
        if start(random_.uniform(0.02, seconds)):
            killed += 1
        else:
            ended += 1
            seconds *= 0.8
            check_the_end()
    assert killed >= min(KILLS, 2), "some kills must have come in time"
    if output.exists():
        assert not start(0.0)
        check_the_end()
    print(f"{killed} killed, {ended} ended before")


@pytest.mark.slow
def test_killed_again_and_again_it_ends_as_if_it_were_not(training_values, tmp_path):
    train_here(training_values, tmp_path / "whole", **CHANGES)
    config, output = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(merged({**training_values, "output": str(output)}, CHANGES)))

    def start(delay: float) -> bool:
        done = subprocess.run(
            [sys.executable, "-c", CODE, "--config", str(config), *resume(output), str(delay), "0"],
            cwd=ROOT,
            env=SINGLE_THREAD,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
        return done.returncode != 0

    kill_and_go_on(start, 0.9, tmp_path / "whole", output)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3"])
def test_one_of_several_processes_is_killed_again_and_again(engine, training_values, tmp_path):
    if engine != "ddp":
        pytest.importorskip("deepspeed")
    launch(engine, PROCESSES, training_values, tmp_path / "whole", **OF_EACH)
    program, output, ranks = tmp_path / "train.py", tmp_path / "run", random.Random(1)
    program.write_text(CODE)

    def start(delay: float) -> bool:
        words = [*resume(output), str(delay), str(ranks.randrange(PROCESSES))]
        done = launched(engine, PROCESSES, training_values, output, *words, program=str(program), **OF_EACH)
        assert done.returncode == 0 or "SIGKILL" in done.stderr or "-9" in done.stderr, done.stderr[-3000:]
        return done.returncode != 0

    kill_and_go_on(start, 6.0, tmp_path / "whole", output)
