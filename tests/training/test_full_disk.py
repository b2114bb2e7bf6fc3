"""A run whose disk is full ends with one paragraph, whatever it was writing, and goes on where there is room again."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from training_runs import SINGLE_THREAD, train_here

ROOT = Path(__file__).parents[2]
# A small file system of memory, seen by this process only.
SMALL = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"'
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SMALL, "sh"]


def can_mount(directory: Path) -> bool:
    return (
        shutil.which("unshare") is not None
        and not subprocess.run([*UNSHARE, "100k", str(directory), "true"], capture_output=True, check=False).returncode
    )


@pytest.fixture(scope="module")
def needed(training_values, tmp_path_factory) -> int:
    """Bytes of all that the run leaves."""
    output = tmp_path_factory.mktemp("whole") / "run"
    train_here(training_values, output, checkpoint_every=1, optimizer={"steps": 4, "batch_size": 2})
    return sum(path.stat().st_size for path in output.rglob("*") if path.is_file())


# Room for nearly nothing, for TensorBoard's first rows, for a state, for two.
@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.8])
def test_a_full_disk_is_one_paragraph(four_steps, needed, tmp_path, share):
    size = str(int(share * needed))
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("this machine lets no user mount a file system")
    values = {**yaml.safe_load(four_steps.read_text()), "output": str(disk / "run"), "checkpoint_every": 1}
    four_steps.write_text(yaml.safe_dump(values))
    command = [sys.executable, str(ROOT / "train_dynakv.py"), "--config", str(four_steps)]
    done = subprocess.run(
        [*UNSHARE, size, str(disk), *command], cwd=ROOT, env=SINGLE_THREAD, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr[-3000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr[-3000:]
    assert "cannot be written: no space left on device; make room" in lines[0]
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_a_place_that_is_read_only_is_one_paragraph(four_steps, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("this machine lets no user mount a file system")
    values = {**yaml.safe_load(four_steps.read_text()), "output": str(disk / "run")}
    four_steps.write_text(yaml.safe_dump(values))
    command = [sys.executable, str(ROOT / "train_dynakv.py"), "--config", str(four_steps)]
    done = subprocess.run(
        [*UNSHARE, "1m,ro", str(disk), *command],
        cwd=ROOT,
        env=dict(os.environ, **SINGLE_THREAD),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
