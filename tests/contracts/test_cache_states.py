"""Random lives of a cache against a dense model that reads every sequence anew.

The model has one layer, so that the dense model can be told, token by token, what a cache has forgotten. Nothing is
truncated: whatever a cache then answers differently is a mistake of its bookkeeping.
"""

import copy

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from methods import calibration_of, dynakv_model, tiny_model, unpacked

from lowrank_kv.eviction import Eviction
from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from lowrank_kv.hf.cache.windowed.sequence import WindowedSequence
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig, make_plan

VOCABULARY, MAX_TOKENS, MAX_BATCH = 97, 150, 6
EVICTION = Eviction(keep_ratio=0.5, window_size=4, kernel_size=1)
EXAMPLES, STEPS = 80, 50


def small_model():
    return tiny_model(num_hidden_layers=1, max_position_embeddings=MAX_TOKENS + 60)


def dynakv_maker(model):
    return dynakv_model(model, 1.0, eviction=EVICTION)


def online_maker(model):
    config = OjaKVConfig.preset(
        "ojakv-joint", rate=1.0, num_sink_tokens=2, recent_window=3, update_period=4, eviction=vars(EVICTION) | {}
    )
    plan = make_plan(calibration_of(model), config)
    return lambda: OjaKVCache(model, plan)


def rows_maker(model):
    """Of keys and values as one row."""
    settings = {"num_sink_tokens": 2, "recent_window": 3, "update_period": 4, "eviction": vars(EVICTION) | {}}
    config = OjaKVConfig.preset("joint-mixed", rate=1.0, joint_layers=1, **settings)
    plan = unpacked(make_plan(calibration_of(model, read=True, joint_layers=1), config))
    return lambda: OjaKVCache(model, plan)


def places_of(sequence) -> list[int]:
    """Places of the tokens a sequence still has."""
    positions = sequence.positions.stored() if isinstance(sequence, WindowedSequence) else sequence.positions()
    return list(range(sequence.length)) if positions is None else positions.tolist()


class CacheLife(RuleBasedStateMachine):
    """Every sequence is a list of tokens and the set of places the cache has forgotten."""

    make_maker = None
    steps = 0

    def __init__(self):
        super().__init__()
        if type(self).dense is None:
            type(self).dense = small_model()
            type(self).model = small_model()
            type(self).make_cache = staticmethod(type(self).make_maker(type(self).model))

    dense = model = make_cache = None

    @initialize(batch=st.integers(1, 3), length=st.integers(1, 40), seed=st.integers(0, 10**6))
    def prompt(self, batch, length, seed):
        self.cache = self.make_cache()
        self.tokens = torch.empty(batch, 0, dtype=torch.long)
        self.forgotten = [set() for _ in range(batch)]
        self.read(length, seed)

    def read(self, count, seed):
        """The cache reads tokens; every prediction must be the dense model's."""
        type(self).steps += 1
        new = torch.randint(1, VOCABULARY, (len(self.tokens), count), generator=torch.Generator().manual_seed(seed))
        past = self.tokens.shape[1]
        self.tokens = torch.cat([self.tokens, new], dim=1)
        with torch.no_grad():
            actual = self.model(new, past_key_values=self.cache, use_cache=True).logits
            seen = torch.ones_like(self.tokens)
            for row, forgotten in enumerate(self.forgotten):
                seen[row, sorted(forgotten)] = 0
            positions = torch.arange(self.tokens.shape[1])[None].expand_as(self.tokens)
            expected = self.dense(self.tokens, use_cache=False, attention_mask=seen, position_ids=positions).logits
        torch.testing.assert_close(actual, expected[:, past:], atol=1e-4, rtol=0)
        for row, sequence in enumerate(self.cache.layers[0].sequences):
            held = set(places_of(sequence))
            gone = set(range(self.tokens.shape[1])) - held
            if count <= MAX_DECODE_QUERIES:
                assert gone == self.forgotten[row], "a few tokens must not make the cache forget"
            else:
                assert gone >= self.forgotten[row], "what is forgotten cannot come back"
                assert len(gone - self.forgotten[row]) == count - EVICTION.num_kept(count)
            self.forgotten[row] = gone
        assert self.cache.get_seq_length() == self.tokens.shape[1]
        assert self.cache.nbytes == sum(tensor.nbytes for _, tensor in self.cache.tensors_by_kind())

    def has_room(self):
        return self.tokens.shape[1] < MAX_TOKENS

    @precondition(has_room)
    @rule(count=st.integers(1, MAX_DECODE_QUERIES), seed=st.integers(0, 10**6))
    def append(self, count, seed):
        self.read(count, seed)

    @precondition(has_room)
    @rule(count=st.integers(MAX_DECODE_QUERIES + 1, 40), seed=st.integers(0, 10**6))
    def append_and_evict(self, count, seed):
        self.read(count, seed)

    @rule(count=st.integers(0, 12))
    def crop(self, count):
        type(self).steps += 1
        length = self.tokens.shape[1] - count
        fixed = max(sequence.min_crop_length for sequence in self.cache.layers[0].sequences)
        if length <= 0 or length < fixed:
            if count and length:
                with pytest.raises(UserError, match="evicted" if length > 0 else "must be between"):
                    self.cache.crop(-count)
            return
        self.cache.crop(-count)
        self.tokens = self.tokens[:, :length]
        self.forgotten = [{place for place in gone if place < length} for gone in self.forgotten]

    @rule(data=st.data())
    def reorder(self, data):
        batch = len(self.tokens)
        self.take(data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch)), "reorder_cache")

    @rule(data=st.data())
    def select(self, data):
        batch = len(self.tokens)
        rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=batch, unique=True))
        self.take(rows, "batch_select_indices")

    def take(self, rows, operation):
        type(self).steps += 1
        getattr(self.cache, operation)(torch.tensor(rows))
        self.tokens = self.tokens[rows]
        self.forgotten = [set(self.forgotten[row]) for row in rows]

    @precondition(lambda self: 2 * len(self.tokens) <= MAX_BATCH)
    @rule()
    def repeat(self):
        type(self).steps += 1
        self.cache.batch_repeat_interleave(2)
        self.tokens = self.tokens.repeat_interleave(2, dim=0)
        self.forgotten = [set(gone) for gone in self.forgotten for _ in range(2)]

    @rule()
    def go_on_with_a_copy(self):
        type(self).steps += 1
        twin = copy.deepcopy(self.cache)
        with torch.no_grad():  # what the original reads must not show in the copy
            self.model(self.tokens[:, :1], past_key_values=self.cache, use_cache=True)
        self.cache = twin

    @precondition(lambda self: self.tokens.shape[1] >= MAX_TOKENS)
    @rule(length=st.integers(1, 40), seed=st.integers(0, 10**6))
    def start_again(self, length, seed):
        self.cache.reset()
        self.tokens = self.tokens[:, :0]
        self.forgotten = [set() for _ in self.forgotten]
        self.read(length, seed)


@pytest.mark.parametrize(
    "maker", [dynakv_maker, online_maker, rows_maker], ids=["dynakv", "ojakv-joint", "joint-mixed"]
)
def test_any_life_of_a_cache_is_the_dense_models(maker):
    machine = type("CacheLifeOf" + maker.__name__, (CacheLife,), {"make_maker": staticmethod(maker)})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, derandomize=True)
    )
    assert machine.steps >= 1000, f"only {machine.steps} steps were taken"


@torch.no_grad()
def test_a_copy_of_a_cache_is_no_more_another_models_than_the_cache():
    model, other = small_model(), small_model()
    ids = torch.randint(1, VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(0))
    cache = model(ids, past_key_values=dynakv_maker(model)()).past_key_values
    dynakv_maker(other)
    for each in (cache, copy.deepcopy(cache)):
        with pytest.raises(UserError, match="is a cache of another model"):
            other(ids[:, :1], past_key_values=each)
    assert model(ids[:, :1], past_key_values=copy.deepcopy(cache)).past_key_values.get_seq_length() == 21


@pytest.mark.parametrize("preset", ["ojakv-joint", "ojakv-pf", "ojakv-per-head"])
@torch.no_grad()
def test_padding_does_not_move_the_bases_of_a_short_text(preset):
    """Few tokens leave most directions of a basis unseen, and what is not seen must not be divided by."""
    model = tiny_model()
    config = OjaKVConfig.preset(preset, rate=0.3, update_period=4, num_sink_tokens=0, recent_window=0, rank_multiple=1)
    plan = make_plan(calibration_of(model), config)
    ids = torch.randint(1, VOCABULARY, (1, 23), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.int64), ids], dim=1)
    both = torch.cat([padded, torch.randint(1, VOCABULARY, (1, 32), generator=torch.Generator().manual_seed(1))])
    mask = (both != 0).long()
    alone, beside = OjaKVCache(model, plan), OjaKVCache(model, plan)
    model(ids[:, :7], past_key_values=alone)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    model(both[:, :16], attention_mask=mask[:, :16], position_ids=position[:, :16], past_key_values=beside)
    expected, found = [], []
    for place in range(7, 23):
        expected.append(model(ids[:, place : place + 1], past_key_values=alone).logits)
        now, seen = slice(place + 9, place + 10), mask[:, : place + 10]
        both_now = model(both[:, now], attention_mask=seen, position_ids=position[:, now], past_key_values=beside)
        found.append(both_now.logits[:1])
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), atol=1e-2, rtol=0)


@torch.no_grad()
def test_a_cache_that_is_reset_has_no_number_of_sequences():
    model = tiny_model()
    cache = dynakv_model(model, 1.0)()
    model(torch.randint(1, 97, (3, 20)), past_key_values=cache)
    assert cache.batch_size == 3
    cache.reset()
    assert cache.batch_size == -1  # as transformers has it of a fresh one
    model(torch.randint(1, 97, (2, 20)), past_key_values=cache)
    assert cache.batch_size == 2
