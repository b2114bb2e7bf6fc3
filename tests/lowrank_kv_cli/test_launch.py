"""`lowrank-kv launch` ends as the command does that it starts: with one line."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ready_python import program
from training_runs import SINGLE_THREAD

from lowrank_kv.utils import cli
from lowrank_kv.utils.errors import UserError
from lowrank_kv_cli import launch as launch_command

ROOT = Path(__file__).parents[2]


SINGLE = ("--config_file", "configs/accelerate/single.yaml")
TWO = ("--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "--mixed_precision", "no")
LONG = 600  # seconds that an end may take on a busy machine, before pytest ends the test without a word of it


@contextlib.contextmanager
def launch(*words: object, python: str = sys.executable) -> Iterator[subprocess.Popen]:
    """A launcher, which ends with the block, and with it the processes that it has started."""
    mark = f"test_launch {uuid.uuid4()}"
    process = subprocess.Popen(
        [python, "-m", "lowrank_kv_cli", "launch", *map(str, words)],
        cwd=ROOT,
        env={**SINGLE_THREAD, "PYTHON_EXEC": python, "ACCELERATE_USE_CPU": "true", "LAUNCHED_BY": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has them, and what they start, ignore it.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            end_all(mark)


def end_all(mark: str) -> None:
    """Kill the processes that have inherited this in their environment: torch puts each worker into a group of its own, so
    that those of a launcher that was killed are found by nothing else."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


def training(training_values, tmp_path, **changes) -> tuple[object, ...]:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**training_values, "output": str(tmp_path / "run"), **changes}))
    return "-m", "lowrank_kv_cli", "train", "--config", path


@pytest.mark.parametrize("options", [SINGLE, TWO], ids=["one", "two"])
def test_ctrl_c_is_one_line(training_values, tmp_path, options):
    endless = training(training_values, tmp_path, optimizer={"steps": 10**6, "batch_size": 1})
    with launch(*options, *endless) as process:
        while not (tmp_path / "run/metrics.jsonl").exists():
            assert process.poll() is None, process.communicate()[1][-2000:]
            time.sleep(0.1)
        assert process.poll() is None, "it trains"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, error = process.communicate(timeout=LONG)
    assert process.returncode == 130, error[-2000:]
    assert "Traceback" not in error
    assert error.splitlines().count("interrupted") == 1


@pytest.mark.parametrize("options", [SINGLE, TWO], ids=["one", "two"])
def test_a_mistake_is_one_line(training_values, tmp_path, options):
    with launch(*options, *training(training_values, tmp_path, seed=-1), python=program()) as process:
        _, error = process.communicate(timeout=LONG)
    assert process.returncode == 2
    assert "Traceback" not in error
    # A second process that is not ended in time says the same.
    assert len({line for line in error.splitlines() if line.startswith("error: ")}) == 1


@pytest.mark.parametrize(("rank", "waits"), [(None, False), ("0", False), ("1", True)])
def test_the_first_process_says_a_mistake_at_once_and_others_later(rank, waits, monkeypatch, capsys):
    """The end of the first one most often ends them before."""

    def fail(argv):
        raise UserError("this is wrong")

    def sleep(seconds):
        assert seconds > 1
        said_before.append(capsys.readouterr().err)

    said_before = []
    monkeypatch.setattr(cli.time, "sleep", sleep)
    monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        cli.run(fail)
    assert ended.value.code == cli.MISTAKE
    assert said_before == [""] * waits
    assert capsys.readouterr().err == "error: this is wrong\n"


@pytest.mark.parametrize(("rank", "said"), [("0", "interrupted\n"), ("1", "")])
def test_the_first_process_alone_says_that_it_was_interrupted(rank, said, monkeypatch, capsys):
    def wait(argv):
        raise KeyboardInterrupt

    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        cli.run(wait)
    assert ended.value.code == cli.INTERRUPTED
    assert capsys.readouterr().err == said


def test_an_end_that_is_no_mistake_names_its_process():
    with launch(*TWO, "-m", "no_such_module") as process:
        _, error = process.communicate(timeout=LONG)
    assert process.returncode == 1
    assert "ended with status 1, and the launcher ended the others" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--config_file", "missing.yaml", "-m", "lowrank_kv_cli", "--version"),
            "accelerate cannot launch so: .*missing.yaml",
        ),
        (("--multi_gpu", "--num_processes", "1", "-m", "lowrank_kv_cli", "--version"), "accelerate cannot launch so: "),
    ],
)
def test_the_launcher_s_own_mistakes_are_one_line(words, message):
    with pytest.raises(UserError, match=message):
        launch_command.main(list(words))
