"""Budgets in words."""

import pytest

from lowrank_kv.utils.budget import Budget, parse_size
from lowrank_kv.utils.errors import UserError


@pytest.mark.parametrize(
    ("text", "nbytes", "tokens"),
    [
        ("4096 B/token", 4096, None),
        ("4.5KiB / token", 4608, None),
        ("2 GiB/131072 tokens", 2 * 2**30, 131_072),
        ("2 GiB / 131072 tokens", 2 * 2**30, 131_072),
        ("500 MB/100_000 tokens", 500_000_000, 100_000),
        ("1.5 gb/1,000 tokens", 1_500_000_000, 1000),
        (".5 MiB/1 token", 524_288, 1),
    ],
)
def test_a_budget_is_read_from_words(text, nbytes, tokens):
    assert Budget.parse(text) == Budget(nbytes=nbytes, tokens=tokens)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.3",
        1.5,
        "4096",
        "4096 B",
        "2 GiB/tokens of text",
        "0 B/token",
        "2 GiB/0 tokens",
        "-1 B/token",
        "2 GiT/token",
    ],
)
def test_other_words_are_refused_with_an_example(text):
    with pytest.raises(UserError, match=r"`budget` must be bytes .* such as `4096 B/token` .* got"):
        Budget.parse(text)


def test_a_size_is_whole_bytes():
    assert parse_size("24 GiB", "--memory") == 24 * 2**30
    assert parse_size("1.5 B", "--memory") == 1
    for text in ("24", "0.5 B", "GiB", "24 GiB/token"):
        with pytest.raises(UserError, match="`--memory` must be a number of bytes with its unit, such as `24 GiB`"):
            parse_size(text, "--memory")
