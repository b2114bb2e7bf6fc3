"""The rule of what a right text is: right texts pass whatever their prompts are read in, and wrong ones do not."""

import pytest
import torch
from methods import METHODS, tiny_model

from benchmarks.right_texts import (
    FEWEST,
    Distance,
    Reference,
    Text,
    controls,
    drift,
    forced,
    furthest,
    gaps,
    greedy,
    longest,
    spread_of,
)

TOKENS = 10
PROMPTS = [[7 * i % 90 + n for i in range(length)] for n, length in enumerate((9, 150, 140, 30), 1)]


@pytest.fixture(scope="module")
def reference():
    [method] = [each for each in METHODS if each.name == "static-mixed"]
    model = tiny_model()
    make_cache = method.build(model, 0.3)
    return Reference(model, make_cache)


@pytest.fixture(scope="module")
def expected(reference):
    return [reference.expected(prompt, TOKENS) for prompt in PROMPTS]


def test_the_spread_is_what_the_likeliest_of_one_run_lacks_in_another():
    one_TV = torch.tensor([[3.0, 1.0, 0.0], [0.0, 4.0, 5.0], [0.0, 9.0, 2.0]])
    other_TV = torch.tensor([[9.0, 1.0, 0.0], [0.0, 5.0, 4.5], [0.0, 5.0, 2.0]])
    assert spread_of(one_TV, one_TV) == 0
    assert spread_of(one_TV, other_TV) == spread_of(other_TV, one_TV) == 1  # at the second place, where they part
    assert spread_of(one_TV, other_TV + 4) == 1  # the same distribution


def test_a_drift_is_a_mean_over_enough_tokens():
    zero_T = torch.zeros(2 * FEWEST)
    early_T, late_T = zero_T.clone(), zero_T.clone()
    early_T[0], late_T[-1] = FEWEST, FEWEST
    assert drift(zero_T, zero_T) == 0
    assert drift(zero_T, early_T) == drift(zero_T, -early_T) == 1  # of the first FEWEST, not halved by those behind
    assert drift(zero_T, late_T) == 0.5
    assert drift(zero_T[: FEWEST - 1], early_T[: FEWEST - 1]) == 0


def test_a_gap_is_what_a_token_lacks_of_the_likeliest():
    logits_TV = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 5.0]])
    assert gaps(logits_TV, [0, 2]).tolist() == [0, 0]
    assert gaps(logits_TV, [1, 0]).tolist() == [2, 5]


def test_only_the_longest_texts_are_left():
    assert longest([(1, 2), (1,), (1, 2, 3), (1, 3), (1, 2), ()]) == [(1, 2, 3), (1, 3)]
    assert longest([]) == []
    assert longest([()]) == []


def test_a_prompt_that_was_read_is_read_once(reference, expected):
    each = expected[1]
    before = each.read.num_read
    answer, logits_TV = greedy(each.read, TOKENS)
    assert spread_of(forced(each.read, answer.tokens), logits_TV) <= each.spread.gap
    assert answer == each.answer == reference.answer(each.prompt, TOKENS)
    assert each.read.num_read == before == len(each.prompt)


def first(text: Text, count: int) -> Text:
    return Text(text.tokens[:count], text.logprobs[:count])


def test_the_answer_is_right_as_far_as_it_goes(expected):
    for each in expected:
        assert each.distances(first(each.answer, count) for count in (0, 1, TOKENS)) == [Distance(0, 0)] * 3
        assert each.agreed([*each.answer.tokens[:2], -1]) == 2


def test_the_token_that_parts_is_looked_at(expected):
    each = expected[0]
    logits_V = forced(each.read, each.answer.tokens[:3])[-1]
    values, indices = logits_V.topk(3)
    for rank in (1, 2):
        text = Text((*each.answer.tokens[:2], int(indices[rank])), (0.0, 0.0, 0.0))
        [found] = each.distances([text])
        assert found.gap == pytest.approx(float(values[0] - values[rank]), abs=1e-4)


def test_numbers_that_were_told_of_other_tokens_drift(expected):
    each = expected[0]
    moved = Text(each.answer.tokens, tuple(value - 0.5 for value in each.answer.logprobs))
    [found] = each.distances([moved])
    assert found == Distance(0, pytest.approx(0.5, abs=1e-5))
    assert found.exceeds(furthest(expected))


def test_controls_are_further_than_right_texts(reference, expected):
    limit = furthest(expected)
    found = controls(reference, expected, seed=0)
    assert found.keys() == {"foreign", "swapped", "wrong_page"}
    for number, text in found["foreign"]:
        assert expected[number].distances([text])[0].exceeds(limit)
    assert {number for number, _ in found["wrong_page"]} <= {1, 2}  # the others have no page
    for number, text in found["swapped"]:
        assert expected[number].agreed(text.tokens) == len(text.tokens) - 1
        assert expected[number].distances([text])[0].gap > 0
