"""The last number of a range that holds, against trying them all."""

import pytest

from lowrank_kv.utils.search import last_where


@pytest.mark.parametrize("least", [0, 1, 5])
@pytest.mark.parametrize("limit", [5, 6, 40])
def test_the_last_number_that_holds_is_found_wherever_it_is(least, limit):
    for end in range(-1, limit + 3):
        expected = max((n for n in range(least, limit + 1) if n <= end), default=None)
        assert last_where(lambda n, end=end: n <= end, least=least, limit=limit) == expected


def test_nothing_beyond_the_limit_or_twice_is_tried():
    tried = []

    def always(number: int) -> bool:
        tried.append(number)
        return True

    assert last_where(always, least=3, limit=20) == 20
    assert tried == [3, 6, 12, 20]
    assert last_where(always, least=21, limit=20) is None
    assert len(tried) == 4


def test_far_ends_take_few_tries():
    tried = []

    def holds(number: int) -> bool:
        tried.append(number)
        return number <= 1_000_000

    assert last_where(holds, least=1, limit=2**40) == 1_000_000
    assert len(tried) == len(set(tried)) < 45


def test_where_it_turns_more_than_once_one_of_the_turns_is_found():
    held = {1, 2, 3, 4, 5, 7, 8, 9}
    found = last_where(lambda n: n in held, least=1, limit=30)
    assert found in held
    assert found + 1 not in held
