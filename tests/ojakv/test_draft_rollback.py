"""Drafted tokens that are taken back leave no trace in an OjaKV cache: coefficients, bases and full-rank rows are, to the
bit, those of a cache that never saw them.

A layer is driven by itself, with the same states for the same tokens: through a whole model the rounding of products of
other sizes would decide whether a step is halved.

Shapes: H query heads, G KV heads, T tokens, D head dim.
"""

import pytest
import torch
from methods import METHODS, calibration_of, tiny_model

from lowrank_kv.eviction import Eviction
from lowrank_kv.hf.backends import backend
from lowrank_kv.hf.cache.layer import CallContext
from lowrank_kv.hf.geometry import attention_modules
from lowrank_kv.hf.rope import Rope
from lowrank_kv.hf.rotary import Rotary
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig, make_plan
from ojakv.online_store import OnlineStore

ONLINE = [method for method in METHODS if not method.name.startswith("dynakv")]
# Beside the presets: a step at every token, and steps that wait for a trigger.
SETTINGS = {
    "every_token": {"update_period": 1, "recent_window": 0, "num_sink_tokens": 0},
    "every_token_recent": {"update_period": 1, "recent_window": 3},
    "triggered": {"update": "triggered", "update_period": 2, "recent_window": 0, "trigger": 0.01},
    "short_prompt": {"update_period": 12, "num_sink_tokens": 8, "recent_window": 30, "full_rank_ratio": 0.4},
    "min_length": {"update_period": 4, "num_sink_tokens": 0, "recent_window": 0, "min_length": 38},
    "whole_prompt": {"update_period": 4, "recent_window": 2, "keep_prompt_full_rank": True},
    "fixed_recent": {"tracker": "fixed", "update_period": 1, "num_sink_tokens": 0, "recent_window": 2},
}


TOKENS = 60


def makers() -> list:
    def maker(settings):
        def build(model, rate):
            plan = make_plan(calibration_of(model), OjaKVConfig(rate=rate, **settings))
            return lambda: OjaKVCache(model, plan)

        return build

    presets = [pytest.param(method.build, id=method.name) for method in ONLINE]
    return presets + [pytest.param(maker(settings), id=name) for name, settings in SETTINGS.items()]


class Reader:
    """Feeds the first layer of a cache with the same random queries, rotated keys and values at the same places."""

    def __init__(self, model, cache):
        self.module, self.cache = attention_modules(model)[0], cache
        self.rotary = Rotary.from_model(model)
        generator = torch.Generator().manual_seed(9)
        self.query_HTD, self.wrong_HTD = torch.randn(2, 4, TOKENS + 40, 16, generator=generator)
        self.key_GTD, self.value_GTD, *self.wrong = torch.randn(4, 2, TOKENS + 40, 16, generator=generator)

    def call(self, tokens: int, drafts: int) -> None:
        """New tokens and, after them, drafts that are taken back at once."""
        layer, past = self.cache.layers[0], self.cache.get_seq_length()
        middle, end = past + tokens, past + tokens + drafts

        def joined(right, wrong):
            return torch.cat([right[:, past:middle], wrong[:, middle:end]], dim=1)[None]

        position = torch.arange(past, end)[None]
        cos_sin = self.rotary.cos_sin(position, self.key_GTD.dtype)
        rope = Rope(self.rotary.function, *cos_sin, position_BT=position)
        mask = (torch.arange(end) <= position[0, :, None])[None, None]
        layer.begin_call(CallContext(rope, mask))
        layer.update(joined(self.key_GTD, self.wrong[0]), joined(self.value_GTD, self.wrong[1]))
        query = joined(self.query_HTD, self.wrong_HTD)
        output, _ = layer.attend(self.module, query, mask, backend("sdpa"), scaling=0.25)
        assert output.shape == (1, tokens + drafts, 4, 16)
        self.cache.crop(-drafts)


@torch.no_grad()
def read(model, cache, *, tokens: int = TOKENS, drafts: int = 0, drafted_prompt: int = 0):
    """A prompt of 30, then one token after another."""
    reader = Reader(model, cache)
    reader.call(30, drafted_prompt)
    for _ in range(30, tokens):
        reader.call(1, drafts)
    return cache


def assert_same_state(actual, expected, *, tokens: int = TOKENS):
    [mine], [theirs] = actual.layers[0].sequences, expected.layers[0].sequences
    assert actual.get_seq_length() == expected.get_seq_length() == tokens
    assert mine.positions.full_rank.rows.tolist() == theirs.positions.full_rank.rows.tolist()
    assert torch.equal(mine.positions.low_rank(), theirs.positions.low_rank())
    assert (mine.num_pinned, mine.has_started) == (theirs.num_pinned, theirs.has_started)
    for one, other in ((mine.key, theirs.key), (mine.value, theirs.value)):
        assert type(one) is type(other)
        if isinstance(one, OnlineStore):
            assert (one.updates, one.trigger.regret) == (other.updates, other.trigger.regret)
            assert one.guard.kept_energy == other.guard.kept_energy
        assert torch.equal(one.basis_PWR, other.basis_PWR)
        # A token compressed by itself, drafts and all, is a product of another size: the same but for its rounding.
        rounding = 1e-5 if mine.schedule.compresses_at_once else 0
        torch.testing.assert_close(one.coef.rows(), other.coef.rows(), atol=rounding, rtol=0)
        assert torch.equal(one.full.rows, other.full.rows)


@pytest.mark.parametrize("build", makers())
@pytest.mark.parametrize("drafts", [1, 7])
def test_cropped_drafts_leave_no_trace(build, drafts):
    model = tiny_model(num_hidden_layers=1)
    make_cache = build(model, 0.4)
    expected = read(model, make_cache())
    assert expected.layers[0].sequences[0].key.coef.length, "some tokens must have been compressed"
    assert_same_state(read(model, make_cache(), drafts=drafts), expected)


@pytest.mark.parametrize("build", makers())
def test_drafts_after_a_prompt_leave_no_trace(build):
    """Where `generate()` drafts, it does so from the first call on, and with any number of tokens; it says so before."""
    model = tiny_model(num_hidden_layers=1)
    make_cache = build(model, 0.4)
    caches = [make_cache(), make_cache()]
    for cache in caches:
        cache.activate_past_recording()
    expected = read(model, caches[0])
    assert_same_state(read(model, caches[1], drafts=20, drafted_prompt=9), expected)


@torch.no_grad()
@pytest.mark.parametrize("build", [maker for maker in makers() if maker.id != "short_prompt"])
def test_a_prompt_that_may_be_cropped_is_compressed_one_call_later(build):
    model = tiny_model(num_hidden_layers=1)
    make_cache = build(model, 0.4)
    at_once, later = make_cache(), make_cache()
    later.activate_past_recording()
    for cache in (at_once, later):
        read(model, cache, tokens=30)
    is_at_once = at_once.layers[0].sequences[0].schedule.compresses_at_once
    assert later.layers[0].sequences[0].key.coef.length == (30 if is_at_once else 0)
    # Another token comes to both; the prompt's own queries have chosen what stays whole.
    for cache in (at_once, later):
        Reader(model, cache).call(1, 0)
    assert_same_state(later, at_once, tokens=31)
    assert later.layers[0].prompts.uncommitted is None


def test_a_prompt_that_is_cropped_away_starts_again():
    [method] = [method for method in ONLINE if method.name == "ojakv-pf"]
    model = tiny_model(num_hidden_layers=1)
    make_cache = method.build(model, 0.4)
    fresh, cache = make_cache(), make_cache()
    for one in (fresh, cache):
        one.activate_past_recording()
    with torch.no_grad():
        Reader(model, cache).call(0, 30)
    assert_same_state(read(model, cache), read(model, fresh))


@torch.no_grad()
def test_queries_of_an_uncommitted_prompt_are_counted():
    [method] = [method for method in ONLINE if method.name == "ojakv-pf"]
    ids = torch.randint(1, 97, (2, TOKENS), generator=torch.Generator().manual_seed(5))
    model = tiny_model(num_hidden_layers=1)
    cache = method.build(model, 0.4)()
    cache.activate_past_recording()
    model(ids, past_key_values=cache)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for _, tensor in cache.tensors_by_kind()
    }
    assert cache.nbytes == sum(storages.values())
    assert cache.layers[0].prompts.uncommitted.query_BHQD.shape == (2, 4, TOKENS, 16)


def test_drafts_and_eviction_are_refused_together():
    model = tiny_model(num_hidden_layers=1)
    ids = torch.randint(1, 97, (1, TOKENS), generator=torch.Generator().manual_seed(5))
    config = OjaKVConfig(eviction=Eviction(keep_ratio=0.5))
    cache = OjaKVCache(model, make_plan(calibration_of(model), config))
    with pytest.raises(UserError, match=r"`eviction.keep_ratio` is 0.5.*or generate without drafts"):
        model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=3, max_new_tokens=4)
