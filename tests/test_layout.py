"""The house rules a machine can check: who may import whom, how files are laid out, and that importing patches nothing.

`python -m scripts.draw_structure` draws the same imports.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from ready_python import program

import lowrank_kv
from lowrank_kv.hf.cache.method_packages import METHOD_PACKAGES
from scripts.import_graph import PACKAGES, circles, imported_names, module_graph, modules, part_graph

ROOT = Path(__file__).parent.parent
UTILS, BASES, STORES = {"lowrank_kv.utils"}, {"lowrank_kv.bases"}, {"lowrank_kv.stores"}
SEAMS = {"lowrank_kv.codec", "lowrank_kv.eviction"}  # what the author of a method meets
OPS, HF = {"lowrank_kv.ops"}, {"lowrank_kv.hf"}
CORE = UTILS | BASES | STORES | SEAMS | OPS | HF | {"lowrank_kv.calibration"}
METHODS = {"dynakv", "ojakv"}
# What each part may import. The two methods never import each other, nor do training and evaluation.
MAY_IMPORT = {
    "lowrank_kv.utils": set(),
    "lowrank_kv.bases": UTILS,
    "lowrank_kv.stores": UTILS,
    "lowrank_kv.eviction": UTILS,
    "lowrank_kv.codec": UTILS | STORES | {"lowrank_kv.eviction"},
    "lowrank_kv.ops": UTILS | BASES | STORES | {"lowrank_kv.codec"},
    "lowrank_kv.hf": UTILS | STORES | SEAMS | OPS,
    "lowrank_kv.calibration": UTILS | BASES | STORES | HF,
    "dynakv": CORE,
    "ojakv": CORE,
    "lowrank_kv_auto": CORE | METHODS,
    "training": CORE | METHODS,
    "evaluation": CORE | METHODS,
    "lowrank_kv_vllm": CORE | METHODS,
    "lowrank_kv_cli": CORE
    | METHODS
    | {
        "lowrank_kv_vllm",
        "lowrank_kv_auto",
    },  # its commands in `training` and `evaluation` are found by name when they run
    "benchmarks": CORE | METHODS | {"training", "evaluation", "lowrank_kv_vllm"},
    "scripts": CORE | METHODS | {"training", "evaluation", "lowrank_kv_auto", "lowrank_kv_cli"},
}
# A wheel holds these within `lowrank_kv_cli`, so that their modules name one another from where they stand.
MOVED_BY_THE_WHEEL = ("training", "evaluation")


def test_every_part_imports_only_what_it_may():
    graph = part_graph(ROOT)
    assert graph.keys() == MAY_IMPORT.keys(), "a new part of the house needs a row in MAY_IMPORT"
    broken = {part: others - MAY_IMPORT[part] for part, others in graph.items() if others - MAY_IMPORT[part]}
    assert not broken, f"imports against the direction: {broken}"


def test_nothing_imports_itself_in_a_circle():
    assert circles(part_graph(ROOT)) == []
    assert circles(module_graph(ROOT)) == []


def test_only_what_the_wheel_moves_imports_relatively():
    for name, path in modules(ROOT).items():
        package, text = name.split(".")[0], path.read_text(encoding="utf-8")
        is_moved = package in MOVED_BY_THE_WHEEL
        assert is_moved or "\nfrom ." not in text, f"{path.relative_to(ROOT)} imports relatively"
        assert not is_moved or f"from {package}" not in text, f"{path.relative_to(ROOT)} names its own package"


def test_only_the_seams_and_the_map_stand_at_the_cores_door():
    assert sorted(path.name for path in (ROOT / "lowrank_kv").glob("*.py")) == [
        "__init__.py",
        "codec.py",
        "eviction.py",
    ]


def test_the_map_of_the_core_names_every_part():
    for part in CORE:
        assert part.removeprefix("lowrank_kv.") in lowrank_kv.__doc__, f"lowrank_kv/__init__.py says nothing of {part}"


def test_tests_mirror_the_packages():
    """Each folder of tests has the name of what it tests; what concerns all methods alike is in `contracts` or `golden`."""
    folders = {
        path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith(("_", "."))
    }
    assert folders <= {*PACKAGES, "contracts", "golden"}
    inner = {
        path.name for path in (ROOT / "tests/lowrank_kv").iterdir() if path.is_dir() and not path.name.startswith("_")
    }
    assert inner <= {path.name for path in (ROOT / "lowrank_kv").iterdir() if path.is_dir()}


def test_caches_know_the_packages_of_all_methods():
    assert {package.removesuffix(".") for package in METHOD_PACKAGES} == METHODS | {"lowrank_kv"}


def test_files_stay_small():
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules(ROOT).values()}
    assert {path: size for path, size in sizes.items() if size > 400} == {}
    assert sorted(sizes.values())[len(sizes) // 2] < 200


def test_only_hf_reaches_into_transformers():
    for name, path in modules(ROOT).items():
        if not name.startswith("lowrank_kv.hf"):
            found = {other for other in imported_names(name, path) if other.startswith("transformers.")}
            private = {other for other in found if other.split(".")[1].islower()}  # a class is taken from the top
            assert not private, f"{path.relative_to(ROOT)} imports {private}"


def test_benchmarks_on_random_tokens_need_no_datasets():
    names = [f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("*.py")]
    code = f"import sys, importlib; sys.modules['datasets'] = None; [importlib.import_module(name) for name in {names}]"
    subprocess.run([program(), "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    "broken", ["import dynakv.cache", "from dynakv import cache", "from dynakv.cache import DynaKVCache"]
)
def test_the_graph_sees_every_form_of_import(tmp_path, broken):
    for package, text in (("ojakv", broken), ("dynakv", "")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "cache.py").write_text(text)
    assert module_graph(tmp_path)["ojakv.cache"] == {"dynakv.cache"}
    assert part_graph(tmp_path)["ojakv"] == {"dynakv"}
    (tmp_path / "dynakv/cache.py").write_text("import ojakv.cache")
    assert circles(part_graph(tmp_path)) == [["dynakv", "ojakv"]]


def test_the_graph_follows_relative_imports_to_packages_above(tmp_path):
    for name, text in (
        ("a/b/c.py", "from ...d import e\nfrom ..f import g\nfrom . import h"),
        ("d.py", ""),
        ("a/f.py", ""),
    ):
        path = tmp_path / "ojakv" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "ojakv/a/b/h.py").write_text("")
    assert module_graph(tmp_path)["ojakv.a.b.c"] == {"ojakv.d", "ojakv.a.f", "ojakv.a.b.h"}


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
