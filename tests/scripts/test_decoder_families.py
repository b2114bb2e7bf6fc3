"""Every decoder family that transformers has is served as it computes by itself, or refused with a reason."""

import re
from pathlib import Path

import pytest
import transformers

from scripts.list_models import DOCUMENT, REFUSED, SERVED, problems, table, try_family
from scripts.tiny_families import families

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / DOCUMENT).read_text(encoding="utf-8")
IS_LISTED = f"transformers `{transformers.__version__}`" in TEXT


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gpt_oss",  # sinks
        "smollm3",  # layers that rotate nothing
        "beam",  # rotations for each kind of layers, none for one of them
        "lfm2_moe",  # a rotary module of another name
        "gemma4",  # an encoder of images numbers its attention, too
        "roc_bert",
    ],
)
def test_families_that_are_served(family):
    found = try_family(family)
    assert found.result == SERVED, found


@pytest.mark.parametrize(
    ("family", "because"),
    [
        ("deepseek_v3", "multi-head latent attention"),
        ("diffllama", "changes keys or values between its cache and its attention"),
        ("doge", "hides other tokens from each head"),
        ("gemma3n_text", "attend to the keys and values of another layer"),
        ("mllama", "attend to an image"),
        ("mpt", "computes attention in its own modules"),
    ],
)
def test_families_that_are_refused(family, because):
    found = try_family(family)
    assert found.result == REFUSED, found
    assert because in found.because


def test_the_list_has_every_family_of_the_version_that_it_names():
    assert problems(TEXT) == []
    without = re.sub(r"`llama`", "", TEXT)
    assert not IS_LISTED or problems(without) == [f"{DOCUMENT} says nothing of `llama`"]


@pytest.mark.slow
@pytest.mark.skipif(not IS_LISTED, reason="docs/models.md is of another version of transformers")
def test_the_list_is_what_trying_all_families_gives():
    findings = [try_family(name) for name in families()]
    assert table(findings) in TEXT
