"""What CONTRIBUTING says of the code is true of the code."""

import functools
import re
from pathlib import Path

import pytest

from benchmarks.trace_key import files_entered

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return TEXT.split(f"### {title}\n")[1].split("\n#")[0]


def named_files(text: str) -> set[str]:
    return set(re.findall(r"`([\w/]+\.py)`", text))


@functools.cache
def own_files() -> tuple[str, ...]:
    """Python's files of the project, without those of environments (hidden folders) and of what was built."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name != "build"]
    found = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    return tuple(f"/{path.relative_to(ROOT)}" for path in found)


def is_there(name: str) -> bool:
    return any(path.endswith(f"/{name}") for path in own_files())


@pytest.mark.parametrize("title", ["The way of a key", "The way of a training batch"])
def test_a_way_is_short_and_its_files_exist(title):
    steps = [line for line in section(title).splitlines() if re.match(r"\d+\. ", line)]
    assert 5 <= len(steps) <= 15
    for name in named_files(section(title)):
        assert is_there(name), f"{name} is nowhere"


def test_the_way_of_a_key_names_every_file_that_a_decoded_key_enters():
    named = named_files(section("The way of a key"))
    entered = files_entered("dynakv")
    unnamed = [path for path in entered if not any(path.endswith(f"/{name}") for name in named)]
    assert not unnamed, f"CONTRIBUTING does not name {unnamed}"
    invented = [name for name in named if not any(path.endswith(name) for path in entered)]
    assert not invented, f"no decoded key enters {invented}"


def test_every_file_named_in_backticks_exists():
    for name in named_files(TEXT):
        assert is_there(name), f"{name} is nowhere"
