"""A build that a killed process began is never waited for."""

import logging
import os
import signal
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest
from methods import tiny_model
from torch.utils.file_baton import FileBaton

from lowrank_kv.utils import build_locks
from lowrank_kv.utils.build_locks import LOCK, await_builds, quanto_folders, torch_folders
from lowrank_kv.utils.errors import UserError

BUILDER = """
import sys
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire()
print("building", flush=True)
sys.stdin.read()
baton.release()
"""


def builder(lock) -> subprocess.Popen:
    """Another process that builds, as torch does, until its input ends."""
    command = [sys.executable, "-c", BUILDER, str(lock)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"building\n"
    return process


def test_the_lock_of_a_killed_builder_is_removed_and_named(tmp_path, caplog):
    process = builder(tmp_path / LOCK)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / LOCK).exists()
    with caplog.at_level(logging.WARNING, "lowrank_kv"):
        await_builds([tmp_path])
    assert not (tmp_path / LOCK).exists()
    assert str(tmp_path / LOCK) in caplog.text
    assert FileBaton(str(tmp_path / LOCK)).try_acquire()


def test_a_builder_that_lives_is_waited_for(tmp_path, monkeypatch):
    process, looks = builder(tmp_path / LOCK), []

    def sleep(seconds):
        assert (tmp_path / LOCK).exists()
        looks.append(seconds)
        if len(looks) == 3:
            process.communicate()  # which lets it end

    monkeypatch.setattr(build_locks.time, "sleep", sleep)
    await_builds([tmp_path])
    assert len(looks) == 3
    assert not (tmp_path / LOCK).exists()
    assert process.returncode == 0


def test_a_lock_that_is_just_let_go_is_no_lock_that_was_left(tmp_path, caplog):
    """torch closes it and then removes it."""
    (tmp_path / LOCK).touch()
    release = threading.Timer(0.2, (tmp_path / LOCK).unlink)
    release.start()
    with caplog.at_level(logging.WARNING, "lowrank_kv"):
        await_builds([tmp_path])
    release.join()
    assert not caplog.text


@pytest.mark.parametrize("after", [1, 2])
def test_the_next_builders_lock_stays(tmp_path, caplog, monkeypatch, after):
    """It has come since the one that was left was looked at, and removed by another process that waits."""
    lock, baton = tmp_path / LOCK, FileBaton(str(tmp_path / LOCK))
    lock.touch()
    owners, looks = build_locks._owners, []

    def next_builder_comes(path):
        found = owners(path)
        looks.append(found)
        if len(looks) == after:
            lock.unlink()
            assert baton.try_acquire()
            threading.Timer(0.7, baton.release).start()
        return found

    monkeypatch.setattr(build_locks, "_owners", next_builder_comes)
    with caplog.at_level(logging.WARNING, "lowrank_kv"):
        await_builds([tmp_path])
    assert [os.getpid()] in looks
    assert not caplog.text
    assert not list(tmp_path.iterdir())


def test_a_lock_that_another_process_has_removed_is_not_told_twice(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "lowrank_kv"):
        build_locks._remove_if_nobody_has_it(tmp_path / LOCK)
    assert not caplog.text


def test_a_build_without_end_is_given_up_with_its_file_and_owner(tmp_path):
    process = builder(tmp_path / LOCK)
    try:
        with pytest.raises(
            UserError, match=rf"process {process.pid} builds .*held `{tmp_path / LOCK}` for more than 1 s"
        ):
            await_builds([tmp_path], patience=1)
        assert (tmp_path / LOCK).exists(), "the lock of a builder that lives stays"
    finally:
        process.kill()
        process.wait()


def test_no_lock_is_removed_where_the_system_names_no_processes(tmp_path, monkeypatch):
    """As macOS, which has no /proc: the owner may live."""
    (tmp_path / LOCK).touch()
    monkeypatch.setattr(os, "listdir", Mock(side_effect=FileNotFoundError))
    await_builds([tmp_path])
    assert (tmp_path / LOCK).exists()


def test_a_folder_without_a_lock_costs_nothing(tmp_path):
    await_builds([tmp_path, tmp_path / "missing"])


def test_where_torch_and_quanto_build(tmp_path, monkeypatch):
    """The folders that have a lock, where torch and quanto look for them."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "one").mkdir()
    (tmp_path / "py311_cpu/two").mkdir(parents=True)
    assert torch_folders() == []
    for folder in ("one", "py311_cpu/two"):
        (tmp_path / folder / LOCK).touch()
    assert sorted(torch_folders()) == [tmp_path / "one", tmp_path / "py311_cpu/two"]
    package = tmp_path / "optimum"
    (package / "quanto/library/extensions/cpp/build").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "quanto/library/extensions/cpp/build" / LOCK).touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "optimum"]:
        monkeypatch.delitem(sys.modules, name)
    assert quanto_folders() == [package / "quanto/library/extensions/cpp/build"]


def test_quanto_is_built_though_a_killed_process_has_left_its_lock(tmp_path, monkeypatch):
    """What a peer's cache does first."""
    from evaluation.peers import quantized_cache

    (tmp_path / LOCK).touch()
    monkeypatch.setattr(quantized_cache, "quanto_folders", lambda: [tmp_path])
    monkeypatch.setattr(quantized_cache, "_MODULES", {"optimum-quanto": "torch"})  # any that is installed
    quantized_cache.quantized_maker(tiny_model(), "quanto-int4")
    assert not (tmp_path / LOCK).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_lock_of_another_user_is_left_to_torch(tmp_path, monkeypatch):
    (tmp_path / LOCK).touch()
    os.chown(tmp_path / LOCK, 12345, 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert build_locks._owners(tmp_path / LOCK) is None
    await_builds([tmp_path])
    assert (tmp_path / LOCK).exists()
