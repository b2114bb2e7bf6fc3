"""The kernels' tests in Triton's interpreter, which must be asked for before a kernel is defined: in other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.7")  # an older interpreter fails with new versions of NumPy
KERNELS = Path(__file__).parent / "kernels"
ROOT = KERNELS.parents[2]
FILES = sorted(KERNELS.glob("test_*.py"))
OF_SLOW = [path for path in FILES if "pytest.mark.slow" in path.read_text(encoding="utf-8")]


# A file at a time, so that the time that a test may take is that of a file.
@pytest.mark.parametrize(
    ("path", "which"),
    [
        *((path, "not slow") for path in FILES),
        *(pytest.param(path, "slow", marks=pytest.mark.slow) for path in OF_SLOW),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_in_the_interpreter(path, which):
    # One thread: the interpreter's small products only make threads wait for one another.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment = {**os.environ, **threads, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, str(path)]
    # Ends before pytest ends this test, which would show nothing of what was printed.
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    # Status 5 would mean that nothing was collected.
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
