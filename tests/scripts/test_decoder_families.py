"""Every decoder family that transformers has is served as it computes by itself, or refused with a reason."""

import re
from pathlib import Path

import pytest
import transformers
from old_transformers import IS_OLDEST

from lowrank_kv.hf.attention import PreparedAttention
from lowrank_kv.utils.errors import UserError
from scripts.list_models import DOCUMENT, REFUSED, SERVED, check, problems, table, try_family
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
    if IS_OLDEST and family not in families():
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
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


@pytest.mark.skipif(not IS_LISTED, reason="docs/models.md is of another version of transformers")
def test_the_list_has_every_family_of_the_version_that_it_names():
    assert problems(TEXT) == []
    assert problems(re.sub(r"`llama`", "", TEXT)) == [f"{DOCUMENT} says nothing of `llama`"]


def test_a_list_of_another_version_is_not_compared_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(transformers, "__version__", "0.1")
    assert check(re.sub(r"`llama`", "", TEXT)) == []
    assert re.search(r"not compared: .* of transformers \d\S+, and 0.1 is installed", capsys.readouterr().out)
    with pytest.raises(UserError, match="does not name a version"):
        check("")


def test_a_family_that_keeps_more_of_a_rotation_than_budgets_count_is_wrong(monkeypatch):
    """As one would that does not pass position ids to its layers."""
    call_context = PreparedAttention.call_context
    monkeypatch.setattr(
        PreparedAttention, "call_context", lambda self, rope, position, mask: call_context(self, rope, None, mask)
    )
    assert "than budgets count" in try_family("llama").because


@pytest.mark.slow
@pytest.mark.skipif(not IS_LISTED, reason="docs/models.md is of another version of transformers")
def test_the_list_is_what_trying_all_families_gives():
    findings = [try_family(name) for name in families()]
    assert table(findings) in TEXT
