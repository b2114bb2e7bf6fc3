"""The rule of what a right text is: right texts pass whatever their prompts are read in, and wrong ones do not."""

import pytest
import torch
from methods import METHODS, tiny_model

from benchmarks.right_texts import (
    FEWEST,
    MARGIN,
    NOISE,
    PIECES,
    READINGS,
    ROUNDING,
    Distance,
    Expected,
    Reference,
    Text,
    controls,
    drift,
    forced,
    gaps,
    greedy,
    lead_change,
    limits,
    longest,
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


def test_what_leads_change_by_leaves_out_the_largest_tenth():
    one_TV = torch.tensor([[3.0, 1.0, 0.0]]).repeat(11, 1)
    other_TV = one_TV.clone()
    other_TV[:, 1] += 0.5  # the next one gains on the likeliest
    other_TV[:, 2] += 9.0  # what is neither of both does not count
    assert lead_change([one_TV, one_TV]) == 0
    assert lead_change([one_TV, other_TV + 4]) == lead_change([other_TV[:, :2], one_TV[:, :2]]) == 0.5
    other_TV[-1, 1] = 8.0
    assert lead_change([one_TV, other_TV]) == 0.5
    other_TV[-2, 1] = 8.0
    assert lead_change([one_TV, other_TV]) == 7


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


def test_all_readings_but_the_first_are_rounded_otherwise(reference, expected):
    plain = reference._reading(PROMPTS[1], [len(PROMPTS[1])], TOKENS)
    first, *others = expected[1].readings
    assert torch.equal(first.read.logits_V, plain.read.logits_V)  # nor does the model keep a hook that adds noise
    for reading in others:
        assert not torch.equal(reading.read.logits_V, plain.read.logits_V)
    # The same pieces twice: noise alone tells them apart, and it is no larger than the difference that it stands for.
    one, other = (
        reference._reading(PROMPTS[0], [len(PROMPTS[0])], 1, noise=NOISE).read.logits_V.log_softmax(0) for _ in range(2)
    )
    assert 0 < (one - other).abs().max() < 1e-4


def test_a_prompt_that_was_read_is_read_once(reference, expected):
    each = expected[1]
    for reading in each.readings:
        before = reading.read.num_read
        assert greedy(reading.read, TOKENS) == reading.answer
        assert reading.read.num_read == before == len(each.prompt)
    assert each.answer == reference.answer(each.prompt, TOKENS)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 18, 95, 96, 97, 400])
def test_prompts_of_every_length_are_read_as_often(reference, length):
    found = reference._divisions(length)
    assert len(found) == READINGS
    assert len(set(found)) == min(READINGS, 2 ** (length - 1))  # there are no more
    assert all(sum(division) == length and min(division) > 0 for division in found)
    for size in (length, *PIECES):
        if size <= length:
            whole, rest = divmod(length, size)
            assert (size,) * whole + (rest,) * bool(rest) in found


def test_every_reading_s_own_answer_is_right(expected):
    """Of a prompt, also where it is far from all other prompts' answers."""
    for each, limit in zip(expected, limits(expected), strict=True):
        assert max(ROUNDING, each.spread.gap) * MARGIN <= limit.gap
        for reading in each.readings:
            [found] = each.distances([reading.answer], limit)
            assert not found.exceeds(limit)


def prompt(gap, drift, readings=()):
    return Expected([1], list(readings), Distance(gap, drift))


def test_a_prompt_of_two_minds_weakens_the_rule_for_itself_only():
    found = limits([prompt(0.1, 0.02), prompt(0.2, 0.03), prompt(9.0, 0.0), prompt(0.0, 5.0), prompt(0.3, 0.01)])
    assert [limit.gap for limit in found] == pytest.approx(
        [0.4, 0.4, 18, 0.4, 0.6]
    )  # twice .2 where it is in the middle
    assert [limit.drift for limit in found] == pytest.approx([0.04, 0.06, 0.04, 10, 0.04])
    assert limits([prompt(0.0, 0.0)]) == [Distance(MARGIN * ROUNDING, MARGIN * ROUNDING)]


class SpokenReading:
    """Says how far texts are, and counts those that it is asked about."""

    def __init__(self, distance):
        self.distance, self.asked = distance, 0

    def distances(self, texts):
        self.asked += len(texts)
        return [self.distance] * len(texts)


def test_the_nearest_reading_counts_and_further_ones_are_not_asked():
    readings = [SpokenReading(Distance(*each)) for each in ((3, 0.5), (1, 0.9), (0, 0))]
    texts = [Text((1, 2), (0.0, 0.0)), Text((1, 3), (0.0, 0.0))]
    assert prompt(0, 0, readings).distances(texts, Distance(1, 0.5)) == [Distance(1, 0.5)] * 2
    assert [reading.asked for reading in readings] == [2, 2, 0]


def first(text: Text, count: int) -> Text:
    return Text(text.tokens[:count], text.logprobs[:count])


def test_the_answer_is_right_as_far_as_it_goes(expected):
    for each in expected:
        texts = [first(each.answer, count) for count in (0, 1, TOKENS)]
        assert each.distances(texts, Distance(0, 0)) == [Distance(0, 0)] * 3
        assert each.agreed([*each.answer.tokens[:2], -1]) == 2


def test_the_token_that_parts_is_looked_at(expected):
    each = expected[0]
    logits_V = forced(each.readings[0].read, each.answer.tokens[:3])[-1]
    values, indices = logits_V.topk(3)
    for rank in (1, 2):
        text = Text((*each.answer.tokens[:2], int(indices[rank])), (0.0, 0.0, 0.0))
        [found] = each.readings[0].distances([text])
        assert found.gap == pytest.approx(float(values[0] - values[rank]), abs=1e-4)


def test_numbers_that_were_told_of_other_tokens_drift(expected):
    each, limit = expected[0], limits(expected)[0]
    moved = Text(each.answer.tokens, tuple(value - 0.5 for value in each.answer.logprobs))
    [found] = each.readings[0].distances([moved])
    assert found == Distance(0, pytest.approx(0.5, abs=1e-5))
    assert each.distances([moved], limit)[0].exceeds(limit)


def test_controls_are_further_than_right_texts(reference, expected):
    allowed = limits(expected)
    found = controls(reference, expected, seed=0)
    assert found.keys() == {"foreign", "swapped", "wrong_page"}
    for number, text in found["foreign"]:
        assert expected[number].distances([text], allowed[number])[0].exceeds(allowed[number])
    assert {number for number, _ in found["wrong_page"]} <= {1, 2}  # the others have no page
    for number, text in found["swapped"]:
        answer, place = expected[number].answer, len(text.tokens) - 1
        assert expected[number].agreed(text.tokens) == place
        assert expected[number].distances([text], Distance(0, 0))[0].gap > 0
        logits_TV = forced(expected[number].readings[0].read, answer.tokens)
        value_T5 = logits_TV.topk(5, dim=1).values
        lack_T = value_T5[:, 0] - value_T5[:, -1]
        assert float(gaps(logits_TV[place : place + 1], text.tokens[-1:])) == pytest.approx(float(lack_T[place]))
        assert lack_T[place] >= min(1.0, float(lack_T.max()))
