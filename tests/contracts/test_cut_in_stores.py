"""A call that was cut short while it wrote to a cache's stores: after `crop(0)` the cache reads as one that was never cut.

Writes of one layer are cut, every so many of them, and others with each method. `CUT_LINES` says how many lines of the
package are cut besides.
"""

import copy
import functools
import os
import random
import sys
from pathlib import Path

import pytest
import torch
from methods import METHODS, calibration_of, dynakv_model, tiny_model

import lowrank_kv
from lowrank_kv.eviction import Eviction
from lowrank_kv.hf.cache.ragged_layer import RaggedSequence
from lowrank_kv.hf.cache.windowed import sequence as windowed_sequence
from lowrank_kv.stores import tokenwise
from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.growable_tensor import GrowingRows, GrowingTensor
from lowrank_kv.stores.tokenwise import TokenwiseCoefficients
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig, make_plan

BY_NAME = {method.name: method for method in METHODS}
PACKAGES = tuple(f"{Path(lowrank_kv.__file__).parents[1] / name}{os.sep}" for name in ("lowrank_kv", "ojakv", "dynakv"))
LINES = int(os.environ.get("CUT_LINES", "6"))
MOST_CUTS = 8  # of a call
WRITES = [
    (GrowingRows, "reserve"),
    (GrowingRows, "count_written"),
    (GrowingTensor, "append"),
    (GrowingTensor, "append_number"),
    (Coefficients, "_write"),
    (TokenwiseCoefficients, "_append"),
    (RaggedSequence, "note_appended"),
    (windowed_sequence, "append_full_rank"),
]
# Of a text, the tokens that the call which is cut brings: the first prompt, another chunk, a token, a few.
CALLS = {"prompt": (0, 30), "chunk": (30, 52), "token": (52, 53)}
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


@pytest.fixture
def ids():
    return torch.randint(1, 97, (2, 70), generator=torch.Generator().manual_seed(0))


class Cut(BaseException):
    """As an interrupt is."""


class WriteCuts:
    """Counts the writes of one layer's calls, and cuts one of them."""

    def __init__(self, model, monkeypatch, layer=1):
        self.is_watching, self.at, self.seen = False, None, 0
        module = model.model.layers[layer].self_attn
        module.register_forward_pre_hook(lambda *_: self._watch(True))
        module.register_forward_hook(lambda *_: self._watch(False))
        for owner, name in WRITES:
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _watch(self, is_watching):
        self.is_watching = is_watching

    def _counted(self, write):
        def counted(*args, **settings):
            self.seen += self.is_watching
            if self.is_watching and self.seen == self.at:
                self.is_watching = False
                raise Cut
            return write(*args, **settings)

        return counted

    def run(self, call, at=None):
        """Run a call that is cut before one of its writes, or not at all; returns how many there are."""
        self.at, self.seen, self.is_watching = at, 0, False
        if at is None:
            call()
        else:
            with pytest.raises(Cut):
                call()
        return self.seen

    def moments(self, call, method):
        """Writes of a call to cut, of which each method has others."""
        writes = self.run(call)
        step = -(-writes // MOST_CUTS)
        return range(1 + METHODS.index(method) % step, writes + 1, step)


def read(model, ids, cache, start, *ends):
    """Logits of the text from `start` on, in pieces that end there."""
    logits = []
    for end in ends:
        logits.append(model(ids[:, start:end], past_key_values=cache).logits)
        start = end
    return torch.cat(logits, dim=1)


def cache_before(model, make_cache, ids, start):
    cache = make_cache()
    for first, end in ((0, 30), (30, 52)):
        if end <= start:
            model(ids[:, first:end], past_key_values=cache)
    return cache


def whole_after_cuts(cuts, method, before, call):
    """Copies of `before`, made whole by `crop(0)`, after each write of `call(cache)` in turn was cut."""
    for at in cuts.moments(functools.partial(call, copy.deepcopy(before)), method):
        cache = copy.deepcopy(before)
        cuts.run(functools.partial(call, cache), at)
        cache.crop(0)
        yield cache


@every_method
@torch.no_grad()
def test_every_write_may_be_cut(method, ids, monkeypatch):
    model = tiny_model()
    make_cache = method.build(model, 1.0)
    stock = tiny_model()(ids).logits
    cuts = WriteCuts(model, monkeypatch)
    for start, end in CALLS.values():
        before = cache_before(model, make_cache, ids, start)

        def call(cache, start=start, end=end):
            model(ids[:, start:end], past_key_values=cache)

        for cache in whole_after_cuts(cuts, method, before, call):
            assert {layer.get_seq_length() for layer in cache.layers} == {start}
            found = read(model, ids, cache, start, end, end + 1, 70)
            torch.testing.assert_close(found, stock[:, start:], atol=5e-4, rtol=0)


@every_method
@torch.no_grad()
def test_an_empty_cache_is_as_a_fresh_one(method, ids, monkeypatch):
    """Nothing is left of the text, in bases neither."""
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    cuts = WriteCuts(model, monkeypatch)
    expected = read(model, ids, make_cache(), 0, 30, 31, 70)
    for at in list(cuts.moments(lambda: model(ids[:, :30], past_key_values=make_cache()), method))[::3]:
        cache = make_cache()
        cuts.run(lambda cache=cache: model(ids[:, :30], past_key_values=cache), at)
        cache.crop(0)
        assert torch.equal(read(model, ids, cache, 0, 30, 31, 70), expected)


@pytest.mark.parametrize(
    "name", ["static-mixed", "tokenwise-mixed", "adaptive-mixed", "joint-mixed", "dynakv-tokenwise-plan"]
)
@torch.no_grad()
def test_packed_rows_are_as_they_were(name, ids, monkeypatch):
    """Bits differ from token to token: a row too many, or a byte, would move all that follow. What the first layer stores
    does not depend on what it is asked."""
    model, method = tiny_model(), BY_NAME[name]
    make_cache = method.build(model, 0.5)
    cuts = WriteCuts(model, monkeypatch, layer=0)

    def rows(cache):
        read(model, ids, cache, cache.get_seq_length(), 70)
        [first, second] = cache.layers[0].sequences
        return [store.coef.rows() for each in (first, second) for store in (each.key, each.value)]

    before = cache_before(model, make_cache, ids, 30)
    for start, end in ((30, 52), (52, 53), (53, 54), (54, 55), (55, 56)):
        expected = rows(copy.deepcopy(before))

        def call(cache, start=start, end=end):
            model(ids[:, start:end], past_key_values=cache)

        for cache in whole_after_cuts(cuts, method, before, call):
            for found_1NR, expected_1NR in zip(rows(cache), expected, strict=True):
                # The last of them may wait longer, and a product of fewer rows may be rounded otherwise, and a row with it.
                count = min(found_1NR.shape[1], expected_1NR.shape[1])
                assert count >= expected_1NR.shape[1] - 4
                assert (found_1NR[:, :count] != expected_1NR[:, :count]).any(dim=2).sum() <= 1
        call(before)


@torch.no_grad()
def test_rows_that_are_refused_leave_none(ids, monkeypatch):
    """The values of a chunk are too many bytes; its keys are not stored without them."""
    model = tiny_model()
    cache = BY_NAME["tokenwise-mixed"].build(model, 0.5)()
    model(ids[:, :30], past_key_values=cache)
    [sequence, _] = cache.layers[0].sequences
    rows = sequence.key.coef.length, sequence.value.coef.length
    most = sequence.value.coef.stored.length
    append = TokenwiseCoefficients.append

    def appended(coef, *args, **settings):
        monkeypatch.setattr(tokenwise, "_MOST_BYTES", most if coef is sequence.value.coef else 2**31 - 1)
        append(coef, *args, **settings)

    monkeypatch.setattr(TokenwiseCoefficients, "append", appended)
    with pytest.raises(UserError, match="take a lower rate"):
        model(ids[:, 30:52], past_key_values=cache)
    assert rows == (sequence.key.coef.length, sequence.value.coef.length) == (sequence.positions.num_low_rank,) * 2


@pytest.mark.parametrize("name", ["ojakv-joint", "tokenwise-mixed", "joint-mixed"])
@torch.no_grad()
def test_the_last_layer_is_whole_without_a_crop(name, ids, monkeypatch):
    """All layers have the call's tokens then, so that nothing refuses the next."""
    model = tiny_model()
    cache = BY_NAME[name].build(model, 1.0)()
    model(ids[:, :30], past_key_values=cache)
    stores = [(sequence.key, sequence.value) for sequence in cache.layers[2].sequences]
    write, stock = Coefficients._write, tiny_model()(ids).logits

    def cut(coef, *args, **settings):
        if any(coef is getattr(value, "coef", None) for _, value in stores):
            raise Cut
        return write(coef, *args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(Coefficients, "_write", cut)
        with pytest.raises(Cut):
            model(ids[:, 30:52], past_key_values=cache)
    found = read(model, ids, cache, 52, 53, 70)
    torch.testing.assert_close(found, stock[:, 52:], atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", ["dynakv", "ojakv-joint", "static-pca-h"])
@torch.no_grad()
def test_an_eviction_is_done_or_not(name, ids, monkeypatch):
    """Where it is not, the tokens stay: the last layer has them, and nothing refuses the next."""
    model, eviction = tiny_model(), {"keep_ratio": 0.5, "window_size": 4, "kernel_size": 1}
    if name == "dynakv":
        make_cache = dynakv_model(model, 1.0, eviction=Eviction(**eviction))
    else:
        config = OjaKVConfig.preset(name, rate=1.0, num_sink_tokens=2, eviction=eviction)
        plan = make_plan(calibration_of(model), config)

        def make_cache():
            return OjaKVCache(model, plan)

    expected = make_cache()
    read(model, ids, expected, 0, 40)
    cuts, keep = [], GrowingRows.keep
    for at in (1, 2):
        cache, seen = make_cache(), []

        def cut(rows, index_N, at=at, cache=cache, seen=seen):
            seen.extend([rows] * bool(cache.layers[2].is_initialized))
            if len(seen) == at:
                raise Cut
            keep(rows, index_N)

        with monkeypatch.context() as patch:
            patch.setattr(GrowingRows, "keep", cut)
            with pytest.raises(Cut):
                model(ids[:, :40], past_key_values=cache)
        cuts.append([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(40, 44)][-1])
        assert cuts[-1].isfinite().all()
        assert {layer.get_seq_length() for layer in cache.layers} == {44}
        cache.crop(-4)  # none of the last layer is evicted, and of the others only those before
        for sequence in cache.layers[2].sequences:
            assert not sequence.min_crop_length
        cache.crop(-40)
        found, fresh = read(model, ids, cache, 0, 40), read(model, ids, make_cache(), 0, 40)
        assert torch.equal(found, fresh)
    assert torch.equal(*cuts)


def cut_at_call_from(function, number, call):
    """Run a call that is cut where `function` calls another for the so-manyth time; returns how often it did."""
    seen, code = 0, function.__code__

    def at_call(frame, event, _):
        nonlocal seen
        if event == "call" and frame.f_back is not None and frame.f_back.f_code is code:
            seen += 1
            if seen == number:
                sys.setprofile(None)
                raise Cut

    sys.setprofile(at_call)
    try:
        call()
    except Cut:
        pass
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("name", ["ojakv-joint", "static-mixed"])
@pytest.mark.parametrize("change", ["compress", "evict", "crop"])
@torch.no_grad()
def test_a_sequence_changes_whole(name, change, ids):
    """Wherever it is cut, tokens have a key, a value and a position, or none of them."""
    model, eviction = tiny_model(), {"keep_ratio": 0.5, "window_size": 4, "kernel_size": 1}
    settings = {"num_sink_tokens": 2, "recent_window": 3, "update_period": 4}
    config = OjaKVConfig.preset(name, rate=0.5, **settings, eviction=eviction if change == "evict" else {})
    plan = make_plan(calibration_of(model, read=True), config)
    function = getattr(windowed_sequence.WindowedSequence, change)

    before = OjaKVCache(model, plan)
    model(ids[:, :30], past_key_values=before)

    def run(number):
        cache = copy.deepcopy(before)
        call = functools.partial(model, ids[:, 30:52], past_key_values=cache)
        seen = cut_at_call_from(function, number, functools.partial(cache.crop, -2) if change == "crop" else call)
        if change != "evict":  # after which earlier layers have forgotten what they could be cropped to
            cache.crop(0)
        for sequence in (sequence for layer in cache.layers for sequence in layer.sequences):
            stores = sequence.key, sequence.value
            assert {store.full.length for store in stores} == {sequence.positions.full_rank.length}, number
            assert {store.coef.length for store in stores} == {sequence.positions.num_low_rank}, number
        return seen

    calls = run(0)
    assert calls > 6
    for number in range(1, calls + 1):
        run(number)


def cut_at_line(number, call):
    """Run a call that is cut before it runs so many lines of the package; returns how many it ran, and where the cut was."""
    seen, where, tracer = 0, None, sys.gettrace()

    def at_line(frame, event, _):
        nonlocal seen, where
        if event == "line":
            seen += 1
            if seen == number:
                where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                raise Cut
        return at_line

    sys.settrace(lambda frame, *_: at_line if frame.f_code.co_filename.startswith(PACKAGES) else None)
    try:
        call()
    except Cut:
        pass
    finally:
        sys.settrace(tracer)
    return seen, where


@pytest.mark.parametrize("name", ["dynakv", "ojakv-joint", "subspace-a", "adaptive-mixed", "joint-mixed"])
@torch.no_grad()
def test_any_line_may_be_cut(name, ids):
    generator, model = random.Random(name), tiny_model()
    make_cache = BY_NAME[name].build(model, 1.0)
    stock = tiny_model()(ids).logits
    for start, end in CALLS.values():
        before = cache_before(model, make_cache, ids, start)

        def call(cache, start=start, end=end):
            return lambda: model(ids[:, start:end], past_key_values=cache)

        lines, _ = cut_at_line(0, call(copy.deepcopy(before)))
        for number in generator.sample(range(1, lines + 1), min(LINES, lines)):
            cache = copy.deepcopy(before)
            _, where = cut_at_line(number, call(cache))
            cache.crop(0)
            length = cache.get_seq_length()  # `end` where the last layer was cut after it had stored the tokens
            assert length in (start, end), where
            ends = [place for place in (end, end + 1, 70) if place > length]
            found = read(model, ids, cache, length, *ends)
            torch.testing.assert_close(
                found, stock[:, length:], atol=5e-4, rtol=0, msg=lambda text, at=where: f"{at}: {text}"
            )
