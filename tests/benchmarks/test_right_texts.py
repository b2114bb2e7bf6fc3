"""The rule of what a right text is: right texts pass whatever their prompts are read in, and wrong ones do not."""

import pytest
import torch
from methods import METHODS, tiny_model

from benchmarks.right_texts import Reference, controls, forced, gaps, greedy, lead_change, longest, most_lacking, spread

TOKENS = 6
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
    assert spread(one_TV, one_TV) == 0
    assert spread(one_TV, other_TV) == spread(other_TV, one_TV) == 1  # at the second place, where they part
    assert spread(one_TV, other_TV + 4) == 1  # the same distribution


def test_the_change_of_a_lead_counts_where_no_text_parts():
    one_TV = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 5.0]])
    other_TV = torch.tensor([[9.0, 1.0, 0.0], [7.0, 2.5, 4.0]])
    assert lead_change(one_TV, other_TV) == pytest.approx(6)
    assert lead_change(one_TV, one_TV) == 0


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
    torch.testing.assert_close(forced(each.read, answer), logits_TV, rtol=0, atol=max(1e-4, each.lead_change))
    assert answer == each.answer == reference.answer(each.prompt, TOKENS)
    assert each.read.num_read == before == len(each.prompt)


def test_the_answer_is_right_as_far_as_it_goes(expected):
    for each in expected:
        assert [each.gap(each.answer[:length]) for length in (0, 1, TOKENS)] == [0, 0, 0]
        assert each.agreed([*each.answer[:2], -1]) == 2


def test_the_token_that_parts_is_looked_at(expected):
    each = expected[0]
    logits_V = forced(each.read, each.answer[:3])[-1]
    values, indices = logits_V.topk(3)
    for rank in (1, 2):
        found = each.gap([*each.answer[:2], int(indices[rank])])
        assert found == pytest.approx(float(values[0] - values[rank]), abs=1e-4)


def test_controls_are_wrong_and_lack_more_than_right_texts(reference, expected):
    limit = most_lacking(expected)
    found = controls(reference, expected, seed=0)
    assert found.keys() == {"foreign", "swapped", "wrong_page"}
    for number, text in found["foreign"]:
        assert text != expected[number].answer
        assert expected[number].gap(text) > limit
    assert {number for number, _ in found["wrong_page"]} <= {1, 2}  # the others have no page
    assert all(len(text) <= TOKENS for _, text in found["swapped"])
