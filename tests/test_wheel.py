"""The wheel: what it holds, and that all of it works where there is no checkout.

It is built from a copy, since setuptools leaves a `build/` folder whose stale files would be in the next wheel. It is
installed into a new environment that sees the dependencies of this one, but not the checkout.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from lowrank_kv_cli.__main__ import COMMANDS

ROOT = Path(__file__).parent.parent
OURS = {"lowrank_kv", "dynakv", "ojakv", "lowrank_kv_auto", "lowrank_kv_cli", "lowrank_kv_vllm"}
INSIDE = {"training": "lowrank_kv_cli/training", "evaluation": "lowrank_kv_cli/evaluation"}
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | {
    "OMP_NUM_THREADS": "1"
}
# What loading any model imports of transformers, which are most of the seconds that our own first import takes.
LOADS_ANY_MODEL = "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel"
IMPORT_SHARE = 0.1  # of the processor time of the above, that ours may take; 0.05 was measured


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source, output = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("wheel")
    for folder in (*OURS, *INSIDE):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", output, source], check=True)
    [path] = output.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The `bin` folder of an environment with the wheel and with the dependencies of this one."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    [site] = home.glob("lib/python*/site-packages")
    # Lines of a .pth file become entries of sys.path, whose own .pth files, of an editable checkout, are not read.
    dependencies = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        home / "bin/python",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, "--disable-pip-version-check", wheel], check=True, env=ENVIRONMENT)
    return home / "bin"


@pytest.fixture
def call(installed, tmp_path):
    """Run a program of that environment outside the checkout; returns its standard output."""

    def run(program: str, *arguments: object, status: int = 0) -> str:
        command = [installed / program, *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
        assert done.returncode == status, done.stderr[-3000:]
        return done.stdout if status == 0 else done.stderr

    return run


def test_the_wheel_holds_our_six_names_and_every_file_of_theirs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in held} == OURS
    wanted = set()
    for folder in (*OURS, *INSIDE):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                wanted.add(f"{INSIDE.get(folder, folder)}/{path.relative_to(ROOT / folder).as_posix()}")
    assert held == wanted, "a package or a data file is missing from pyproject.toml, or is there too much"


def test_packages_are_imported_from_the_wheel_and_only_by_our_names(call, installed):
    code = f"""
import importlib.util, pkgutil, importlib
import lowrank_kv, dynakv, ojakv, lowrank_kv_auto, lowrank_kv_cli, lowrank_kv_vllm
assert lowrank_kv.compress is lowrank_kv_auto.compress
for package in (lowrank_kv, dynakv, ojakv, lowrank_kv_auto, lowrank_kv_cli, lowrank_kv_vllm):
    assert package.__file__.startswith({str(installed.parent)!r}), package.__file__
for name in ("training", "evaluation", "benchmarks", "scripts", "tests"):
    spec = importlib.util.find_spec(name)
    assert spec is None or {str(ROOT)!r} not in str(spec), spec
for module in pkgutil.walk_packages(lowrank_kv_cli.__path__, "lowrank_kv_cli."):
    importlib.import_module(module.name)
assert ojakv.OjaKVConfig.preset("ojakv-pf").layout == "per_head"
from lowrank_kv.ops.native import library
assert list(__import__("pathlib").Path(library.__file__).parent.glob("*.c"))
"""
    call("python", "-c", code)


def test_importing_costs_little_beyond_torch_and_transformers(call):
    """In processor time, of which a busy machine takes no more, as a share of theirs, which is as slow as the machine."""
    code = f"""
import time
start = time.process_time()
{LOADS_ANY_MODEL}
theirs = time.process_time() - start
import sys
before = set(sys.modules)
start = time.process_time()
import dynakv, ojakv
ours = time.process_time() - start
heavy = {{"datasets", "tensorboard", "deepspeed", "peft", "matplotlib", "pandas", "triton"}} & (set(sys.modules) - before)
assert not heavy, heavy
print(ours / theirs)
"""
    shares = []
    while len(shares) < 3 and min(shares, default=1.0) >= IMPORT_SHARE:
        shares.append(float(call("python", "-c", code)))
    assert min(shares) < IMPORT_SHARE, shares


def test_the_console_command_works(call):
    text = call("lowrank-kv", "--help")
    assert all(f"  {name} " in text for name in COMMANDS)
    assert "lowrank-kv 0." in call("lowrank-kv", "--version")
    assert call("lowrank-kv", "trian", status=2) == "error: unknown command `trian`; did you mean `train`?\n"


def test_a_compressor_is_trained_inspected_and_served(call, training_values, tmp_path):
    values = {**training_values, "output": str(tmp_path / "run"), "optimizer": {"steps": 2, "batch_size": 2}}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(values))
    checkpoint = tmp_path / "run/checkpoint"
    assert f"checkpoint: {checkpoint}" in call("lowrank-kv", "train", "--config", tmp_path / "train.yaml")
    found = json.loads(call("lowrank-kv", "inspect", checkpoint, "--json"))
    assert found["summary"]["steps"] == 2
    assert len(found["rates"]["keys"]) == len(found["rates"]["values"]) == 2
    assert found["training"]["dataset"]["name"] == [values["dataset"]["name"]]
    report = call("lowrank-kv", "generate", "--checkpoint", checkpoint, "--prompt", "the cache", "--max-new-tokens", 3)
    assert "bytes for 11 tokens" in report
