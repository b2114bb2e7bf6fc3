"""The house rules a machine can check: imports flow one way, and importing patches nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOVED = {"training", "evaluation"}  # the packages that a wheel holds within lowrank_kv_cli
# A package may import those to its left in any of its rows, and itself.
ALLOWED = {
    "lowrank_kv": set(),
    "dynakv": {"lowrank_kv"},
    "ojakv": {"lowrank_kv"},
    "training": {"lowrank_kv", "dynakv", "ojakv"},
    "evaluation": {"lowrank_kv", "dynakv", "ojakv"},
    "benchmarks": {"lowrank_kv", "dynakv", "ojakv", "training", "evaluation"},
}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[0]
            names_its_own = node.level == 1 or node.module.split(".")[0] == package
            assert node.level == (names_its_own and package in MOVED), f"{path}: {node.module}"
            names.add(f"{package}.{node.module or ''}" if node.level else node.module)
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_flow_one_way(package):
    for path in (ROOT / package).rglob("*.py"):
        ours = {name.split(".")[0] for name in imported(path)} & (ALLOWED.keys() | {"scripts", "tests"})
        assert ours <= ALLOWED[package] | {package}, f"{path.relative_to(ROOT)} imports {ours}"


def test_only_lowrank_hf_reaches_into_transformers():
    public = {"transformers"}
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            if (ROOT / "lowrank_kv/hf") not in path.parents:
                found = {name for name in imported(path) if name.split(".")[0] == "transformers"}
                assert found <= public, f"{path.relative_to(ROOT)} imports {found}"


def test_benchmarks_on_random_tokens_need_no_datasets():
    modules = [f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("*.py")]
    code = (
        f"import sys, importlib; sys.modules['datasets'] = None; [importlib.import_module(name) for name in {modules}]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_importing_patches_nothing():
    # Every attribute of transformers' attention, cache and generation modules is the same object before and after.
    code = """
import transformers, transformers.cache_utils, transformers.generation.utils, transformers.masking_utils
import transformers.models.llama.modeling_llama, transformers.integrations.sdpa_attention
modules = [m for n, m in __import__("sys").modules.items() if n.startswith("transformers.") and "lazy" not in n]
def snapshot():
    found = {}
    for m in modules:
        for name, value in vars(m).items():
            if callable(value):
                found[m.__name__, name] = id(value)
                if isinstance(value, type):
                    found.update({(m.__name__, name, k): id(v) for k, v in vars(value).items() if callable(v)})
    return found
before = snapshot()
import lowrank_kv, dynakv, ojakv, training.loop, evaluation.compare
after = snapshot()
changed = [key for key in before if after.get(key) != before[key]]
assert not changed, changed
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_files_stay_small():
    sizes = sorted(len(path.read_text().splitlines()) for package in ALLOWED for path in (ROOT / package).rglob("*.py"))
    assert sizes[-1] <= 400
    assert sizes[len(sizes) // 2] < 200
