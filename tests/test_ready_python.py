"""A process that is ready does what an interpreter does that starts anew."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ready_python import program

SAYS = """
import json, os, sys
print(json.dumps([__name__, sys.argv, sys.path, os.getcwd(), dict(os.environ), sys.stdin.read()]))
print("to the other stream", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "given").mkdir()
    (tmp_path / "says.py").write_text(SAYS)
    return tmp_path


def said(python: str, arguments: list[str], folder: Path) -> tuple[int, list, str]:
    environment = {**os.environ, "PYTHONPATH": "given", "OF_THIS_TEST": "1"}
    done = subprocess.run(
        [python, *arguments], cwd=folder, env=environment, input="what is read", capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    found[4].pop("PWD", None)  # a shell sets it right
    return done.returncode, found, done.stderr


@pytest.mark.parametrize(
    "arguments", [["-c", SAYS, "a", "-c"], ["-m", "says", "b"], ["says.py", "-u"], ["-u", "says.py"]]
)
def test_it_runs_what_an_interpreter_runs(folder, arguments):
    assert said(program(), arguments, folder) == said(sys.executable, arguments, folder)


def test_an_error_is_a_traceback_and_status_1():
    done = subprocess.run([program(), "-c", "1 / 0"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_nothing_of_the_project_is_imported_and_nothing_stays():
    code = "import sys; print([name for name in sys.modules if name.split('.')[0] in {names}]); import lowrank_kv"
    names = {path.name for path in Path(__file__).parents[1].iterdir() if path.is_dir()} | {"datasets"}
    for _ in range(2):
        done = subprocess.run([program(), "-c", code.format(names=names)], capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n"


# A shell that runs the tests in the background has what they start ignore the others.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_too(number):
    code = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = subprocess.Popen([program(), "-c", code], stdout=subprocess.PIPE)
    pid = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(30) == -number
    for _ in range(300):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    pytest.fail("the process still runs after its program has ended")
