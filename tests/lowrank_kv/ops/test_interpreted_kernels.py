"""The kernels' tests in Triton's interpreter, which must be asked for before a kernel is defined: in their own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.7")  # an older interpreter fails with new versions of NumPy
KERNELS = Path(__file__).parent / "kernels"
ROOT = KERNELS.parents[2]


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(which):
    # One thread: the interpreter's small products only make threads wait for one another.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment = {**os.environ, **threads, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, str(KERNELS)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    # Status 5 would mean that nothing was collected.
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
