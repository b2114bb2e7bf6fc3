"""What a record says of methods at equal bytes."""

import math

import pytest

from lowrank_kv.utils.errors import UserError
from scripts.equal_bytes import check_whole, differences, told


def window(held: int, kl: float) -> dict:
    return {"cache_bytes": held, "full_bytes": 100, "kl": kl}


WINDOWS = {
    ("small", "novels"): [window(10, 0.4), window(12, 0.8)],
    ("large", "novels"): [window(20, 0.1), window(20, 0.2)],
    ("other", "novels"): [window(15, 0.1), window(20, 0.1)],
}


def test_a_method_is_compared_with_the_line_between_its_neighbours():
    """In the middle of 0.4 and 0.1 the line is at 0.2; at its end it is the neighbour's own."""
    found = differences(WINDOWS, "novels", "other", ["large", "small"])
    assert found == pytest.approx([math.log(0.5), math.log(0.5)])
    assert told([found], [[0, 1]]).startswith("-50.0% (")
    assert told([found], [[0, 1]]).endswith("less in 2 of 2 windows")


def test_one_method_is_compared_as_it_is():
    assert differences(WINDOWS, "novels", "other", ["small"]) == pytest.approx([math.log(1 / 4), math.log(1 / 8)])


def test_bytes_that_the_line_does_not_reach_are_refused():
    with pytest.raises(UserError, match=r"it holds 0\.100, and they from 0\.150 to 0\.200"):
        differences(WINDOWS, "novels", "small", ["other", "large"])


def test_a_record_of_a_comparison_that_still_runs_is_refused():
    check_whole(WINDOWS, {"novels": [0, 1]}, "record.json")
    with pytest.raises(
        UserError, match="record.json has 2 of 3 windows of novels with `small`; let the comparison come"
    ):
        check_whole(WINDOWS, {"novels": [0, 1, 1]}, "record.json")
