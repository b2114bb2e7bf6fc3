"""The plugin with Triton's kernels, in a process of their own: their interpreter must be asked for before one is defined."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_in_the_interpreter():
    # One thread: the interpreter's small products only make threads wait for one another.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = {**os.environ, **threads, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    # Status 5 would mean that nothing was collected.
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
