"""The retention schedule by its counts, and that a cache and the plan of its bytes follow it alike."""

import dataclasses

import pytest
import torch
from methods import calibration_of, tiny_model
from online_caches import filled

from lowrank_kv.hf.cache.windowed import retention
from lowrank_kv.hf.cache.windowed.planned_sequence import PlannedSequence
from lowrank_kv.hf.cache.windowed.retention import CompressionStep, RetentionSchedule
from ojakv import OjaKVCache, OjaKVConfig, make_plan
from ojakv.planned_bytes import planned_rate

SETTINGS = {"num_sink_tokens": 4, "recent_window": 16, "update_period": 8}


def schedule(phase: int | None = None, **settings) -> RetentionSchedule:
    return RetentionSchedule(OjaKVConfig(**{**SETTINGS, **settings}), phase)


def due(rules: RetentionSchedule, num_waiting: int, **counts) -> CompressionStep | None:
    start = {"num_pinned": 0, "num_seen": num_waiting, "has_started": False, "is_prompt": False}
    return rules.due(num_waiting=num_waiting, **{**start, **counts})


def test_a_prompt_is_compressed_at_once_but_for_sinks_and_recent_tokens():
    assert due(schedule(), 100, is_prompt=True) == CompressionStep(4, 80, 0, is_prompt=True)
    assert due(schedule(), 21, is_prompt=True) == CompressionStep(4, 1, 0, is_prompt=True)
    assert due(schedule(), 20, is_prompt=True) is None


def test_tokens_that_follow_leave_in_full_periods():
    started = {"num_pinned": 4, "has_started": True, "num_seen": 500}
    assert [due(schedule(), 16 + n, **started) for n in (0, 7)] == [None, None]
    for waited, num_due in ((8, 8), (15, 8), (16, 16), (23, 16)):
        assert due(schedule(), 16 + waited, **started) == CompressionStep(4, num_due, 0, is_prompt=False)
    # A later chunk of a prompt leaves in full periods, too, and at the prompt's rate.
    assert due(schedule(), 16 + 23, is_prompt=True, **started) == CompressionStep(4, 16, 0, is_prompt=True)


def test_with_a_phase_tokens_leave_at_its_places_in_the_text():
    """Eight tokens at a time; the first time, those since the prompt."""
    for phase in (0, 3):
        rules = schedule(phase)
        left, seen = 100 - 16, 100  # a prompt of 100 tokens has been compressed
        for _ in range(50):
            seen += 1
            started = {"num_pinned": 4, "has_started": True, "num_seen": seen}
            step = due(rules, seen - left, **started)
            assert (step is None) == ((seen - phase) % 8 != 0)
            if step is not None:
                assert step == CompressionStep(4, seen - 16 - left, 0, is_prompt=False)
                assert step.num_due == 8 or left == 100 - 16
                left += step.num_due
    # A later chunk of a prompt leaves by the same rule, and at the prompt's rate.
    later = due(schedule(3), 16 + 23, is_prompt=True, num_pinned=4, has_started=True, num_seen=503)
    assert later == CompressionStep(4, 19, 0, is_prompt=True)


@torch.no_grad()
@pytest.mark.parametrize(("staggered", "most"), [(True, 1), (False, 3)])
def test_layers_take_turns(ids, staggered, most):
    model = tiny_model(num_hidden_layers=3)
    settings = {**SETTINGS, "staggered": staggered}
    cache = filled(model, calibration_of(model), ids[:1, :50], 50, **settings)
    compressed = []
    for at in range(50, 82):
        before = [layer.sequences[0].key.coef.length for layer in cache.layers]
        model(ids[:1, at : at + 1], past_key_values=cache)
        after = [layer.sequences[0].key.coef.length for layer in cache.layers]
        compressed.append([now - then for now, then in zip(after, before, strict=True)])
    assert max(sum(count > 0 for count in each) for each in compressed) == most
    assert {count for each in compressed[8:] for count in each} == {0, 8}


def test_the_first_step_after_a_short_prompt_waits_for_a_full_period():
    assert due(schedule(), 4 + 16 + 7) is None
    assert due(schedule(), 4 + 16 + 8) == CompressionStep(4, 8, 0, is_prompt=False)
    # Sinks that a crop left pinned count as the sinks they are.
    assert due(schedule(), 16 + 8 + 2, num_pinned=2) == CompressionStep(4, 8, 0, is_prompt=False)


def test_a_sequence_below_the_minimum_length_waits():
    rules = schedule(min_length=60)
    assert due(rules, 59, is_prompt=True) is None
    assert due(rules, 60, is_prompt=True).num_due == 40


def test_a_share_of_a_prompt_is_kept_and_none_of_decoded_tokens():
    rules = schedule(full_rank_ratio=0.1)
    assert due(rules, 120, is_prompt=True) == CompressionStep(4, 100, 10, is_prompt=True)
    assert due(rules, 120) == CompressionStep(4, 100, 0, is_prompt=False)


def test_a_prompt_that_stays_whole_lets_earlier_tokens_leave_first():
    rules = schedule(keep_prompt_full_rank=True, min_length=50)
    counts = {"num_pinned": 30, "num_prompt": 20}
    whole = CompressionStep(30, 20, 20, is_prompt=True)
    assert rules.keep_prompt(num_earlier=0, num_seen=50, **counts) == [whole]
    earlier = CompressionStep(30, 5, 0, is_prompt=False)
    assert rules.keep_prompt(num_earlier=5, num_seen=55, **counts) == [earlier, whole]
    # Earlier tokens of a short sequence stay with the prompt.
    together = CompressionStep(30, 25, 25, is_prompt=True)
    assert rules.keep_prompt(num_earlier=5, num_seen=49, **counts) == [together]


def test_room_is_for_the_tokens_that_wait_until_the_next_step():
    assert schedule().full_rank_capacity(4, held=20) == 4 + 16 + 8 + 1
    assert schedule().full_rank_capacity(4, held=40) == 40
    alone = {"tracker": "fixed", "update_period": 1, "recent_window": 0, "num_sink_tokens": 0}
    assert schedule(**alone).full_rank_capacity(0, held=0) == 1
    assert schedule(**alone).compresses_at_once
    assert schedule(**{**alone, "num_sink_tokens": 4}).compresses_at_once  # a place is known at once
    for waits in ({"tracker": "oja"}, {"recent_window": 1}, {"full_rank_ratio": 0.1}, {"min_length": 2}):
        assert not schedule(**{**alone, **waits}).compresses_at_once


# Steps that are neither refused nor left out, so that every basis moves, and no positions but those of full-rank tokens.
EXACT = {"rope": "post", "max_loss": 1.0}
RULES = {
    "defaults": {},
    "no sinks": {"num_sink_tokens": 0, "recent_window": 0, "update_period": 4},
    "short period": {"num_sink_tokens": 2, "recent_window": 3, "update_period": 4},
    "share of the prompt": {"full_rank_ratio": 0.2, "recent_window": 3, "update_period": 10},
    "whole prompt": {"keep_prompt_full_rank": True, "recent_window": 8, "update_period": 10},
    "late start": {"min_length": 50, "update_period": 4, "recent_window": 3},
    "late start with a share": {"min_length": 20, "full_rank_ratio": 0.2, "update_period": 4, "recent_window": 3},
    "sketch": {"tracker": "frequent_directions", "update_period": 6, "recent_window": 2},
    "integers": {"cache_dtype": "int8", "update_period": 6, "recent_window": 2},
    "fixed": {"tracker": "fixed", "update_period": 6},
    "fixed, recent tokens wait": {"tracker": "fixed", "update_period": 1, "recent_window": 2},
    "fixed, at once": {"tracker": "fixed", "update_period": 1, "recent_window": 0, "num_sink_tokens": 0},
    "fixed, at once behind sinks": {"tracker": "fixed", "update_period": 1, "recent_window": 0, "num_sink_tokens": 3},
}
LENGTHS = [(0, 1), (0, 40), (1, 24), (20, 20), (20, 21), (30, 60), (49, 50), (49, 51), (50, 50), (60, 83)]


@pytest.fixture(scope="module")
def one_layer():
    model = tiny_model(num_hidden_layers=1)
    return model, calibration_of(model)


@torch.no_grad()
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_planned_bytes_equal_the_bytes_held(one_layer, ids, rule):
    model, calibration = one_layer
    settings = {**EXACT, **rule}
    for prompt, tokens in LENGTHS:
        cache = filled(model, calibration, ids[:1, :tokens], max(prompt, 1), **settings)
        plan = make_plan(calibration, OjaKVConfig(rate=0.5, **settings))
        assert_same_counts(cache, PlannedSequence.after(plan.schedule(0), prompt=prompt, tokens=tokens))
        assert cache.rate == planned_rate(plan, prompt=prompt, tokens=tokens, itemsize=4), (prompt, tokens)


@torch.no_grad()
def test_planned_bytes_are_those_of_layers_that_take_turns(ids):
    model = tiny_model(num_hidden_layers=3)
    calibration, settings = calibration_of(model), {**EXACT, "update_period": 10}
    plan = make_plan(calibration, OjaKVConfig(rate=0.5, **settings))
    for tokens in range(60, 71):
        cache = filled(model, calibration, ids[:1, :tokens], 40, **settings)
        assert cache.rate == planned_rate(plan, prompt=40, tokens=tokens, itemsize=4), tokens
        lengths = {layer.sequences[0].key.coef.length for layer in cache.layers}
        assert len(lengths) > 1, "layers must differ"


@torch.no_grad()
@pytest.mark.parametrize(
    "rule", [{"update_period": 10**6}, {"update_period": 20}, {"keep_prompt_full_rank": True}], ids=str
)
def test_what_waits_for_long_grows_as_it_comes(one_layer, ids, rule, monkeypatch):
    model, calibration = one_layer
    settings = {**EXACT, **rule}
    for most in (512, 6, 1):
        monkeypatch.setattr(retention, "_MOST_AHEAD", most)
        for prompt, tokens in ((30, 30), (30, 31), (30, 83), (60, 72)):
            cache = filled(model, calibration, ids[:1, :tokens], prompt, **settings)
            plan = make_plan(calibration, OjaKVConfig(rate=0.5, **settings))
            assert_same_counts(cache, PlannedSequence.after(plan.schedule(0), prompt=prompt, tokens=tokens))
            assert cache.rate == planned_rate(plan, prompt=prompt, tokens=tokens, itemsize=4), (prompt, tokens)
            for _ in range(2):
                full = cache.layers[0].sequences[0].key.full
                assert full.capacity <= full.length + max(most, full.length // 8)
                cache.crop(-1)  # which makes room anew


@torch.no_grad()
def test_room_for_many_changes_no_logits(one_layer, ids, monkeypatch):
    model, calibration = one_layer
    plan, found = make_plan(calibration, OjaKVConfig(rate=0.5, update_period=20)), []
    for most in (512, 2):
        monkeypatch.setattr(retention, "_MOST_AHEAD", most)
        cache = OjaKVCache(model, plan)
        parts = ids[:1].split([30, *[1] * (ids.shape[1] - 30)], dim=1)
        found.append(torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1))
    assert torch.equal(*found)


# Where all of a prompt stays at full rank there is nothing to evict.
EVICTING = {name: rule for name, rule in RULES.items() if not rule.get("keep_prompt_full_rank")}


@torch.no_grad()
@pytest.mark.parametrize("rule", EVICTING.values(), ids=EVICTING)
def test_planned_counts_equal_those_of_a_cache_that_evicts(one_layer, ids, rule):
    """Lists of positions leave room to grow that is not planned, a few bytes a token."""
    model, calibration = one_layer
    eviction = {"keep_ratio": 0.5, "window_size": 4, "kernel_size": 1}
    for prompt, tokens in ((30, 30), (30, 60), (60, 83)):
        config = dataclasses.replace(
            OjaKVConfig(rate=0.5, **EXACT, **rule), eviction=OjaKVConfig.preset("ojakv", eviction=eviction).eviction
        )
        settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        cache = filled(model, calibration, ids[:1, :tokens], prompt, **settings)
        rules = RetentionSchedule.of_layer(config, 0, 1)
        assert_same_counts(cache, PlannedSequence.after(rules, prompt=prompt, tokens=tokens))
        planned = planned_rate(make_plan(calibration, config), prompt=prompt, tokens=tokens, itemsize=4)
        assert cache.rate == pytest.approx(planned, rel=0.01)


def assert_same_counts(cache, planned: PlannedSequence) -> None:
    [sequence] = cache.layers[0].sequences
    assert sequence.length == planned.length
    assert (sequence.num_pinned, sequence.key.full.length) == (
        planned.num_pinned,
        planned.num_pinned + planned.num_waiting,
    )
    assert sequence.key.coef.length == planned.num_low_rank
    assert sequence.has_started == planned.has_started
    assert sequence.key.full.capacity == planned.full_rank_capacity
