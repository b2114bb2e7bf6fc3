"""Two runs never write into one directory; the dead own nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from lowrank_kv.utils import run_lock as module_under_test
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.run_lock import LOCK, run_lock

ROOT = Path(__file__).parents[3]
HOLDER = """
import sys, time
from lowrank_kv.utils.run_lock import run_lock
with run_lock(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"locked\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_told_who_the_first_is(tmp_path, holder):
    for _ in range(2):
        expected = rf"{tmp_path}/run, into which another run writes: host .*, process {holder.pid}, started 20"
        with pytest.raises(UserError, match=expected), run_lock(tmp_path / "run"):
            pass


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_lock_of_a_dead_owner_is_taken_over(tmp_path, holder, how):
    holder.send_signal(how)
    holder.wait()
    with run_lock(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()
    # An owner that could, or that made the directory and left nothing in it, has taken it away.
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


def test_a_process_does_not_take_its_own_lock_twice(tmp_path):
    with run_lock(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()}"), run_lock(tmp_path):
        pass
    with run_lock(tmp_path), run_lock(tmp_path / "inner"):
        pass
    assert list(tmp_path.iterdir()) == [], "a run that wrote nothing leaves nothing"


def test_an_owner_on_another_host_lives_while_it_gives_signs(tmp_path):
    """Its system's lock may not be seen here."""
    lock = tmp_path / LOCK
    lock.write_text(json.dumps({"host": "elsewhere", "pid": 7, "start": "today"}))
    with pytest.raises(UserError, match="host elsewhere, process 7, started today"), run_lock(tmp_path):
        pass
    os.utime(lock, times=(0, time.time() - module_under_test.DEAD_AFTER - 1))
    with run_lock(tmp_path):
        pass


def test_an_owner_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(module_under_test, "RENEWED_EVERY", 0.02)
    with run_lock(tmp_path):
        os.utime(tmp_path / LOCK, times=(0, 0))
        for _ in range(500):
            if (tmp_path / LOCK).stat().st_mtime > 0:
                break
            time.sleep(0.01)
        assert (tmp_path / LOCK).stat().st_mtime > time.time() - 60


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def without_locks(request, monkeypatch):
    """A file system that has no locks of the system."""
    monkeypatch.setattr(module_under_test.fcntl, "flock", Mock(side_effect=OSError(request.param, "no locks")))


@pytest.mark.usefixtures("without_locks")
def test_without_locks_of_the_system_signs_of_life_keep_others_out(tmp_path):
    lock = tmp_path / LOCK
    with run_lock(tmp_path):
        owner = json.loads(lock.read_text())
        assert owner["pid"] == os.getpid()
        with pytest.raises(UserError, match=f"process {os.getpid()}"), run_lock(tmp_path):  # of this host, too
            pass
    assert not lock.exists()
    for gone in (2**22 + 1, 2**80, "damaged"):  # no system gives such numbers
        lock.write_text(json.dumps({**owner, "pid": gone}))
        with run_lock(tmp_path):
            pass
    lock.write_text(json.dumps({**owner, "host": "elsewhere"}))
    with pytest.raises(UserError, match=f"host elsewhere, process {os.getpid()}"), run_lock(tmp_path):
        pass
    assert json.loads(lock.read_text())["host"] == "elsewhere", "what is refused leaves the owner's as it is"
    os.utime(lock, times=(0, time.time() - module_under_test.DEAD_AFTER - 1))
    with run_lock(tmp_path):
        assert json.loads(lock.read_text()) == {**owner, "start": json.loads(lock.read_text())["start"]}
    assert not lock.exists()


def test_a_lock_that_fails_otherwise_lets_nobody_in(tmp_path, monkeypatch):
    monkeypatch.setattr(module_under_test.fcntl, "flock", Mock(side_effect=OSError(errno.EIO, "failing")))
    with pytest.raises(UserError, match="the disk is failing or gone"), run_lock(tmp_path):
        raise AssertionError("nobody has the lock")
    monkeypatch.setattr(module_under_test.fcntl, "flock", Mock(side_effect=OSError(errno.EBADF, "a defect")))
    with pytest.raises(OSError, match="a defect"), run_lock(tmp_path):
        raise AssertionError("nobody has the lock")


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[1]", b'{"pid":'])
def test_a_damaged_lock_without_an_owner_is_taken_over(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    with run_lock(tmp_path):
        pass


def test_many_that_start_at_once_take_turns(tmp_path):
    """Each adds one to a number that it reads and writes slowly."""
    code = """
import sys, time
from pathlib import Path
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.run_lock import run_lock
done, number = 0, Path(sys.argv[1]) / "number"
while done < 20:
    try:
        with run_lock(sys.argv[1]):
            before = int(number.read_text())
            time.sleep(0.001)
            number.write_text(str(before + 1))
            done += 1
    except UserError:
        time.sleep(0.0005)
"""
    (tmp_path / "number").write_text("0")
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT) for _ in range(4)]
    assert [process.wait(timeout=120) for process in processes] == [0] * 4
    assert (tmp_path / "number").read_text() == "80"


def test_training_comparing_and_sweeping_keep_others_out(four_steps, mistake, tmp_path):
    output = tmp_path / "run"
    values = {**yaml.safe_load(four_steps.read_text()), "output": str(output)}
    four_steps.write_text(yaml.safe_dump(values))
    with run_lock(output):
        assert f"process {os.getpid()}" in mistake("train_dynakv.py", "--config", four_steps)
        for command, config in (("compare", "configs/compare-demo.yaml"), ("sweep", "configs/sweep-demo.yaml")):
            found = mistake(command, "--config", config, "--output", output)
            assert f"process {os.getpid()}" in found, found
    assert not output.exists()  # nobody else has written into it
