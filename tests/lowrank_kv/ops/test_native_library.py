"""Building the compiled kernels, and doing without them."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lowrank_kv.ops.native import library as native


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache directory, and nothing built or decided yet."""
    monkeypatch.setenv("LOWRANK_KV_HOME", str(tmp_path))
    monkeypatch.delenv(native.SWITCH, raising=False)
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


@pytest.fixture(scope="session")
def built() -> Path | None:
    """The library that all tests use, which takes seven seconds to build."""
    kernels = native.library()
    return kernels and Path(kernels._name)


@pytest.fixture
def kept(built, fresh):
    """A cache directory in which the library lies already."""
    if built is not None:
        (fresh / "native").mkdir()
        shutil.copy2(built, fresh / "native")
    return fresh


def test_is_built_once_and_found_again(fresh):
    if native.library() is None:
        pytest.skip("there is no C compiler")
    [built] = (fresh / "native").iterdir()
    made = built.stat().st_mtime_ns
    native.library.cache_clear()
    assert native.library() is not None
    assert [path.stat().st_mtime_ns for path in (fresh / "native").iterdir()] == [made]


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_says_so_once(fresh, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    with pytest.warns(UserWarning, match=f"without compiled kernels.*{compiler}.*LOWRANK_KV_NATIVE=0"):
        assert native.library() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.library() is None
    assert not list(fresh.rglob("*.so"))


def test_a_compiler_that_cannot_be_run_is_no_compiler(fresh, monkeypatch, tmp_path):
    program = tmp_path / "foreign-cc"
    program.write_bytes(b"\x7fELF of another processor")
    program.chmod(0o755)
    monkeypatch.setenv("CC", str(program))
    with pytest.warns(UserWarning, match="foreign-cc` cannot be run .*name another in \\$CC"):
        assert native.library() is None


@pytest.mark.parametrize("blank", ["", "  "])
def test_a_blank_compiler_is_none_named(kept, monkeypatch, blank):
    """The name of a library says by what command it was made."""
    monkeypatch.delenv("CC", raising=False)
    native.library()
    usual = [path.name for path in kept.rglob("*.so")]
    native.library.cache_clear()
    monkeypatch.setenv("CC", blank)
    assert (native.library() is None) == (not usual)
    assert [path.name for path in kept.rglob("*.so")] == usual


def test_where_nothing_can_be_kept_it_says_so(kept, monkeypatch):
    if native.library() is None:
        pytest.skip("there is no C compiler")
    native.library.cache_clear()
    (kept / "file").write_text("no directory")
    monkeypatch.setenv("LOWRANK_KV_HOME", str(kept / "file"))
    with pytest.warns(
        UserWarning, match=r"without compiled kernels.*cannot be kept at .*/file/native.*LOWRANK_KV_HOME"
    ):
        assert native.library() is None


def test_can_be_switched_off(fresh, monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.library() is None


def test_shares_the_thread_pool_of_torch(kept):
    """A second OpenMP runtime would have threads of its own, which wait for work in the way of torch's."""
    code = (
        "import torch; from lowrank_kv.ops.native.library import library\n"
        "if library(): print(len({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line}))"
    )
    # No ready process: that has imported others, whose runtimes these are not.
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if not result.stdout:
        pytest.skip("there is no C compiler")
    assert result.stdout.strip() == "1"


def test_nobody_else_may_put_code_where_it_is_kept(kept, monkeypatch):
    folder = kept / "native"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    native.library()
    assert folder.stat().st_mode & 0o022 == 0
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    native.library.cache_clear()
    with pytest.warns(UserWarning, match="belongs to another user.*LOWRANK_KV_HOME"):
        assert native.library() is None


def test_a_library_that_another_can_have_put_there_is_built_anew(built, fresh):
    """While the directory was open to others."""
    if built is None:
        pytest.skip("there is no C compiler")
    planted = fresh / "native" / built.name
    planted.parent.mkdir()
    planted.write_bytes(b"of another")
    planted.chmod(0o666)
    assert native.library() is not None
    assert planted.read_bytes() != b"of another"


@pytest.mark.parametrize("kind", ["private", "absent", "open", "foreign", "link"])
def test_what_is_private(tmp_path, monkeypatch, kind):
    path, other = tmp_path / "kernels.so", tmp_path / "other.so"
    other.touch(mode=0o755)
    if kind == "link":
        path.symlink_to(other)
    elif kind != "absent":
        path.touch(mode=0o755)
    if kind == "open":
        path.chmod(0o775)
    elif kind == "foreign" and os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    elif kind == "foreign":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert native._is_private(path) == (kind == "private")
