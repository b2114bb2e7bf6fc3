"""Building the compiled kernels, and doing without them."""

import os
import subprocess
import warnings

import pytest
from ready_python import program

from lowrank_kv.ops.native import library as native


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache directory, and nothing built or decided yet."""
    monkeypatch.setenv("LOWRANK_KV_HOME", str(tmp_path))
    monkeypatch.delenv(native.SWITCH, raising=False)
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


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


@pytest.mark.parametrize("blank", ["", "  "])
def test_a_blank_compiler_is_none_named(fresh, monkeypatch, blank):
    monkeypatch.delenv("CC", raising=False)
    native.library()
    usual = [path.name for path in fresh.rglob("*.so")]
    native.library.cache_clear()
    monkeypatch.setenv("CC", blank)
    assert (native.library() is None) == (not usual)
    assert [path.name for path in fresh.rglob("*.so")] == usual


def test_where_nothing_can_be_kept_it_says_so(fresh, monkeypatch):
    if native.library() is None:
        pytest.skip("there is no C compiler")
    native.library.cache_clear()
    (fresh / "file").write_text("no directory")
    monkeypatch.setenv("LOWRANK_KV_HOME", str(fresh / "file"))
    with pytest.warns(
        UserWarning, match=r"without compiled kernels.*cannot be kept at .*/file/native.*LOWRANK_KV_HOME"
    ):
        assert native.library() is None


def test_can_be_switched_off(fresh, monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.library() is None


def test_shares_the_thread_pool_of_torch(fresh):
    """A second OpenMP runtime would have threads of its own, which wait for work in the way of torch's."""
    code = (
        "import torch; from lowrank_kv.ops.native.library import library\n"
        "if library(): print(len({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line}))"
    )
    result = subprocess.run([program(), "-c", code], capture_output=True, text=True, check=True)
    if not result.stdout:
        pytest.skip("there is no C compiler")
    assert result.stdout.strip() == "1"


def test_nobody_else_may_put_code_where_it_is_kept(fresh, monkeypatch):
    folder = fresh / "native"
    folder.mkdir()
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
