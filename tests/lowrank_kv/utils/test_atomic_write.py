"""Whatever a disk refuses, and whenever a process is killed: a whole earlier state, and one paragraph."""

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from methods import calibration_of, dynakv_model, tiny_model
from safetensors.torch import save_file

import dynakv
from dynakv.checkpoint_files import CONFIG, WEIGHTS
from lowrank_kv.utils import atomic_write
from lowrank_kv.utils.atomic_write import append_line, new_directory, put_back, write_text
from lowrank_kv.utils.disk_errors import writing
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.run_lock import run_lock
from ojakv import Calibration

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def files_of_at_most(size: int):
    """As on a disk that is full after so many bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def compressor(directory: Path, seed: int) -> None:
    model = tiny_model(seed)
    dynakv_model(model, 0.4)
    dynakv.save_compressor(model, directory)


def full(directory: Path, seed: int) -> None:
    model = tiny_model(seed)
    dynakv_model(model, 0.4)
    dynakv.save_full(model, directory)


def calibration(directory: Path, seed: int) -> None:
    calibration_of(tiny_model(seed)).save(directory, model="tiny", text=["random"])


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("write", [compressor, full, calibration])
@pytest.mark.parametrize("size", [100, 20_000])
def test_a_full_disk_leaves_the_earlier_directory(write, size, tmp_path):
    write(tmp_path / "it", 0)
    before = contents(tmp_path / "it")
    assert max(map(len, before.values())) > 20_000, "the limit must be met"
    with files_of_at_most(size), pytest.raises(UserError, match="`.*it` cannot be written: file too large; raise"):
        write(tmp_path / "it", 1)
    assert contents(tmp_path / "it") == before
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    write(tmp_path / "it", 1)
    assert contents(tmp_path / "it") != before


def test_a_full_disk_leaves_the_earlier_file(tmp_path):
    write_text(tmp_path / "file", "before")
    with files_of_at_most(100), pytest.raises(UserError, match="`.*file` cannot be written: file too large"):
        write_text(tmp_path / "file", "x" * 200)
    with files_of_at_most(4), pytest.raises(UserError, match="cannot be written: file too large"):
        append_line(tmp_path / "file", "more")
    assert contents(tmp_path) == {"file": b"before"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO])
def test_what_a_disk_refuses_is_one_paragraph_and_other_errors_stay(number):
    expected = rf"`there` cannot be written: {os.strerror(number).lower()}; \w+.*as it was$"
    with pytest.raises(UserError, match=expected), writing("there"):
        raise OSError(number, os.strerror(number))
    with pytest.raises(FileNotFoundError), writing("there"):
        raise FileNotFoundError(errno.ENOENT, "nothing there")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no such file system")
@pytest.mark.parametrize("target", ["/proc/it", "/proc/in/it"])
@pytest.mark.parametrize("write", [lambda to: new_directory(to, "known"), run_lock, lambda to: write_text(to, "x")])
def test_a_file_system_that_takes_nothing_new_is_one_paragraph(write, target):
    """It says that what would be new is not there."""
    with pytest.raises(UserError, match=r"^`/proc.* cannot be (made|written).*; choose another place$"), write(target):
        pass


def test_safetensors_says_it_in_other_words(tmp_path):
    with files_of_at_most(100), pytest.raises(UserError, match="file too large"), writing(tmp_path):
        save_file({"x": torch.zeros(1000)}, tmp_path / "x.safetensors")


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")) or fsync(handle)
    )
    compressor(tmp_path / "it", 0)
    *inside, parent = [Path(each) for each in synced]
    assert {path.name for path in inside if path.parent != tmp_path} == {WEIGHTS, CONFIG}
    assert all("-partial-" in str(path) for path in inside)
    assert parent == tmp_path


@pytest.mark.parametrize("write", [compressor, full, calibration])
def test_what_is_written_is_as_readable_as_other_files_of_the_user(write, tmp_path):
    (tmp_path / "other").touch()
    write(tmp_path / "it", 0)
    modes = {path.name: oct(path.stat().st_mode) for path in (tmp_path / "it").iterdir()}
    assert modes == dict.fromkeys(modes, oct((tmp_path / "other").stat().st_mode))


KILLED = """
import os, signal, sys
from pathlib import Path
from lowrank_kv.utils import atomic_write
atomic_write._exchange = lambda *_: False  # as on a file system that cannot
replace = os.replace
def dying(source, target):
    if "-partial-" in str(source):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = dying
with atomic_write.new_directory(sys.argv[1], "known") as partial:
    (partial / "known").write_text("later")
"""


def test_a_kill_between_two_renames_leaves_what_is_found_again(tmp_path):
    calibration(tmp_path / "it", 0)
    (tmp_path / "it/known").touch()
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "it")], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "it").exists()
    Calibration.load(tmp_path / "it")
    (tmp_path / "it").rename(tmp_path / ".it-old-x")
    with new_directory(tmp_path / "it", "known") as partial:
        assert (tmp_path / "it").is_dir()
        (partial / "known").write_text("later")
    assert contents(tmp_path / "it") == {"known": b"later"}


def test_a_name_is_put_back_whatever_characters_it_has(tmp_path):
    (tmp_path / ".run[1]-old-x").mkdir()
    put_back(tmp_path / "run[1]")
    assert [path.name for path in tmp_path.iterdir()] == ["run[1]"]


def test_a_name_that_is_taken_is_not_put_back(tmp_path):
    for name, text in (("it", "now"), (".it-old-x", "then")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "known").write_text(text)
    put_back(tmp_path / "it")
    assert contents(tmp_path / "it") == {"known": b"now"}


@pytest.mark.parametrize("times", [1, 3])
def test_a_reader_between_two_renames_costs_neither_directory(tmp_path, monkeypatch, times):
    """Where names cannot be exchanged, a reader may put the old one back while the new one is about to take its place."""
    monkeypatch.setattr(atomic_write, "_exchange", lambda *_: False)
    target, replace, read = tmp_path / "it", os.replace, []

    def reading(source, destination):
        replace(source, destination)
        if Path(source) == target and len(read) < times:
            put_back(target)
            read.append((target / "known").read_text())

    for text in ("first", "second"):
        with new_directory(target, "known") as partial:
            (partial / "known").write_text(text)
            monkeypatch.setattr(os, "replace", reading)
    assert read == ["first"] * times
    assert contents(target) == {"known": b"second"}
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_disk_that_refuses_the_second_rename_leaves_the_earlier_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_write, "_exchange", lambda *_: False)
    replace = os.replace

    def refusing(source, destination):
        if "-partial-" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, destination)

    (tmp_path / "it").mkdir()
    (tmp_path / "it/known").write_text("first")
    monkeypatch.setattr(os, "replace", refusing)
    with pytest.raises(UserError, match="cannot be written"), new_directory(tmp_path / "it", "known") as partial:
        (partial / "known").write_text("second")
    assert contents(tmp_path / "it") == {"known": b"first"}
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_reader_that_comes_too_late_to_put_a_name_back_is_content(tmp_path, monkeypatch):
    """The successor has its name when the reader gives it to what it found aside."""
    (tmp_path / ".it-old-x").mkdir()

    def late(source, destination):
        Path(destination).mkdir()
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr(os, "replace", late)
    put_back(tmp_path / "it")
    assert (tmp_path / "it").is_dir()


def test_a_replaced_directory_always_has_its_name(tmp_path, monkeypatch):
    """Two names are exchanged in one step: no call of the system leaves the name free."""
    seen = []
    exchange = atomic_write._exchange

    def watched(one, other):
        seen.append(other.exists())
        done = exchange(one, other)
        seen.append(other.exists())
        return done

    monkeypatch.setattr(atomic_write, "_exchange", watched)
    for text in ("first", "second"):
        with new_directory(tmp_path / "it", "known") as partial:
            (partial / "known").write_text(text)
    assert seen == [True, True]
    assert contents(tmp_path / "it") == {"known": b"second"}
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_file_is_as_readable_as_the_user_has_it_and_no_other_becomes_writable(tmp_path, monkeypatch, umask):
    before = os.umask(umask)
    try:
        monkeypatch.setattr(os, "umask", Mock(side_effect=AssertionError("other threads' files would be open")))
        write_text(tmp_path / "text", "text")
        assert (tmp_path / "text").stat().st_mode & 0o777 == 0o666 & ~umask
    finally:
        monkeypatch.undo()
        os.umask(before)


@pytest.mark.parametrize("status", [None, "Name:\tpython\n"])
def test_where_the_system_does_not_say_the_rights_are_those_at_import(tmp_path, monkeypatch, status):
    monkeypatch.setattr(atomic_write, "_STATUS", tmp_path / "status")
    if status is not None:  # as in gVisor
        (tmp_path / "status").write_text(status)
    monkeypatch.setattr(atomic_write, "_UMASK_AT_IMPORT", atomic_write._set_and_restored_umask() | 0o007)
    write_text(tmp_path / "text", "text")
    assert (tmp_path / "text").stat().st_mode & 0o007 == 0


def test_a_directory_is_not_replaced_with_what_else_lies_in_it(tmp_path, monkeypatch):
    calibration(tmp_path / "bases", 0)
    calibration(tmp_path / "bases", 1)
    calibration(tmp_path / "bases/wiki", 0)
    before = contents(tmp_path / "bases/wiki")
    with pytest.raises(UserError, match=r"holds directories \(wiki\), which replacing it would lose"):
        calibration(tmp_path / "bases", 0)
    assert contents(tmp_path / "bases/wiki") == before
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(
        UserError, match="is the working directory, which cannot be replaced; name a directory within it"
    ):
        atomic_write.check_replaceable(".", WEIGHTS)
    with pytest.raises(UserError, match="is a mount point"):
        atomic_write.check_replaceable("/proc", WEIGHTS)


def test_a_file_that_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "real").mkdir()
    for name in ("there", "to_come"):
        (tmp_path / name).symlink_to(tmp_path / "real" / name)
    (tmp_path / "real" / "there").write_text("before")
    for name in ("there", "to_come"):
        write_text(tmp_path / name, "after")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "real" / name).read_text() == "after"
    assert len(list((tmp_path / "real").iterdir())) == 2


def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe` is a device, a pipe or a socket.*another name"):
        write_text(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo()
