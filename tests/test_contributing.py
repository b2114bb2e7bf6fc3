"""What CONTRIBUTING says of the code is true of the code."""

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


@pytest.mark.parametrize("title", ["The way of a key", "The way of a training batch"])
def test_a_way_is_short_and_its_files_exist(title):
    steps = [line for line in section(title).splitlines() if re.match(r"\d+\. ", line)]
    assert 5 <= len(steps) <= 15
    for name in named_files(section(title)):
        assert list(ROOT.glob(f"**/{name}")), f"{name} is nowhere"


def test_the_way_of_a_key_names_every_file_that_a_decoded_key_enters():
    named = named_files(section("The way of a key"))
    entered = files_entered("dynakv")
    unnamed = [path for path in entered if not any(path.endswith(f"/{name}") for name in named)]
    assert not unnamed, f"CONTRIBUTING does not name {unnamed}"
    invented = [name for name in named if not any(path.endswith(name) for path in entered)]
    assert not invented, f"no decoded key enters {invented}"


def test_every_file_named_in_backticks_exists():
    for name in named_files(TEXT):
        assert list(ROOT.glob(f"**/{name}")), f"{name} is nowhere"
