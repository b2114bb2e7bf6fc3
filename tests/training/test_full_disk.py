"""A run whose disk is full ends with one paragraph, whatever it was writing, and goes on where there is room again."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from ready_python import Server
from training_runs import SINGLE_THREAD, train_here

ROOT = Path(__file__).parents[2]
# Small file systems of memory, seen by one process only and by those that it starts.
SMALL = 'while [ "$1" != -- ]; do mount -t tmpfs -o "$1" tmpfs "$2" || exit 1; shift 2; done; shift; exec "$@"'
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SMALL, "sh")
# Room for nearly nothing, for TensorBoard's first rows, for a state, for two.
SHARES = (0.02, 0.2, 0.5, 0.8)
READ_ONLY = "read-only"


def can_mount(directory: Path) -> bool:
    command = [*UNSHARE, "size=100k", str(directory), "--", "true"]
    return shutil.which("unshare") is not None and not subprocess.run(command, capture_output=True).returncode


@pytest.fixture(scope="module")
def needed(training_values, tmp_path_factory) -> int:
    """Bytes of all that the run leaves."""
    output = tmp_path_factory.mktemp("whole") / "run"
    train_here(training_values, output, checkpoint_every=1, optimizer={"steps": 4, "batch_size": 2})
    return sum(path.stat().st_size for path in output.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def disks(needed, tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """A program that starts processes which see small disks, and the folder of those, named by their shares."""
    folder = tmp_path_factory.mktemp("disks")
    options = {f"{share:g}": f"size={int(share * needed)}" for share in SHARES} | {READ_ONLY: "size=1m,ro"}
    for name in options:
        (folder / name).mkdir()
    if not can_mount(folder / READ_ONLY):
        pytest.skip("this machine lets no user mount a file system")
    mounts = [word for name, option in options.items() for word in (option, str(folder / name))]
    server = Server((*UNSHARE, *mounts, "--"))
    yield server.program, folder
    server.close()


def train_on(disk: str, disks, four_steps, **changes) -> str:
    """What a training that cannot write to its disk says."""
    program, folder = disks
    values = {**yaml.safe_load(four_steps.read_text()), "output": str(folder / disk / "run"), **changes}
    four_steps.write_text(yaml.safe_dump(values))
    command = [program, str(ROOT / "train_dynakv.py"), "--config", str(four_steps)]
    done = subprocess.run(command, cwd=ROOT, env=SINGLE_THREAD, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("share", SHARES)
def test_a_full_disk_is_one_paragraph(four_steps, disks, share):
    error = train_on(f"{share:g}", disks, four_steps, checkpoint_every=1)
    [line] = [line for line in error.splitlines() if line.startswith("error: ")]
    assert "cannot be written: no space left on device; make room" in line
    assert "Exception" not in error


def test_a_place_that_is_read_only_is_one_paragraph(four_steps, disks):
    error = train_on(READ_ONLY, disks, four_steps)
    assert len([line for line in error.splitlines() if line.startswith("error: ")]) == 1
