"""Caches within a budget of bytes, and lengths from which bases of a sequence's own pay."""

import warnings

import pytest
import torch
from methods import calibration_of, tiny_model

import lowrank_kv
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig, break_even_tokens, make_plan
from ojakv.basis_plan import plan_of_shapes
from ojakv.byte_budget import plan_for_bytes
from ojakv.planned_bytes import planned_nbytes, planned_rate, token_nbytes

LENGTH = 200


def held(model, cache, tokens: int = LENGTH) -> int:
    ids = torch.randint(1, 97, (1, tokens), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache.nbytes


@pytest.mark.parametrize("preset", ["ojakv-joint", "static-joint-pf", "ojakv-pf", "tokenwise-mixed"])
def test_a_prompt_takes_the_budget_and_no_more(model, calibration, preset):
    config = OjaKVConfig.preset(preset)
    cache = OjaKVCache.from_model(
        model, config, bases=calibration, budget=f"60 KB/{LENGTH} tokens", expected_tokens=LENGTH
    )
    # Where tokens have classes, this text's may be divided a little otherwise than the calibration's.
    allowed = 1.0 if config.token_classes == 1 else 1.05
    assert 0.9 * 60_000 < held(model, cache) <= allowed * 60_000


def test_rotations_that_depend_on_the_length_take_their_rows(calibration):
    """Such a cache keeps cos and sin of every token in place of its position."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny_model(rope_parameters=rope)
    cache = OjaKVCache.from_model(
        model, OjaKVConfig.preset("static-joint-pf"), bases=calibration, budget=f"100 KB/{LENGTH} tokens"
    )
    assert 0.9 * 100_000 < held(model, cache) <= 100_000


@pytest.mark.parametrize("preset", ["static-joint-pf", "static-mixed"])
def test_a_token_takes_the_budget_and_no_more(model, calibration, preset):
    cache = OjaKVCache.from_model(model, OjaKVConfig.preset(preset), bases=calibration, budget="150 B/token")
    first = held(model, cache)
    assert 0.85 * 150 < token_nbytes(cache.compressed_layers()[0].plan, 4) <= 150
    longer = OjaKVCache(model, cache.compressed_layers()[0].plan)
    # Between two prompts, both longer than what is kept whole, only compressed tokens and their positions are added.
    assert (held(model, longer, LENGTH + 32) - first) / 32 - 4 == token_nbytes(longer.compressed_layers()[0].plan, 4)


@pytest.mark.parametrize("prompt", [LENGTH, 60], ids=["one prompt", "decoded"])
def test_steps_that_are_put_off_count_once_there_can_be_any(model, calibration, prompt):
    """A trigger that no regret reaches puts all steps off but those of a prompt."""
    config = OjaKVConfig.preset("ojakv-joint", update="triggered", trigger=1e9, staggered=False)
    plan = make_plan(calibration, config)
    cache = OjaKVCache(model, plan)
    ids = torch.randint(1, 97, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        for part in ids.split([prompt] + [1] * (LENGTH - prompt), dim=1):
            model(part, past_key_values=cache)
    planned = planned_nbytes(plan, prompt=prompt, tokens=LENGTH, itemsize=4)
    assert planned == pytest.approx(cache.nbytes, rel=0.001)


@pytest.mark.parametrize("layout", ["joint", "per_head"])
@pytest.mark.parametrize("cache_dtype", ["model", "int8", "int4"])
@pytest.mark.parametrize("compress", ["both", "keys"])
def test_shapes_say_the_bytes_of_a_plan(calibration, layout, cache_dtype, compress):
    settings = {"layout": layout, "cache_dtype": cache_dtype, "compress": compress}
    config = OjaKVConfig(ranks="fraction", rate=0.4, **settings)
    plan = make_plan(calibration, config)
    shapes = plan_of_shapes(calibration.geometry, config, rotation_bytes=plan.rotation_bytes)
    assert token_nbytes(shapes, 2) == token_nbytes(plan, 2)
    for prompt in (10, LENGTH):
        text = {"prompt": prompt, "tokens": LENGTH, "itemsize": 2}
        assert planned_nbytes(shapes, **text) == planned_nbytes(plan, **text)


@pytest.mark.parametrize("preset", ["static-pca", "static-joint-pf", "static-mixed"])
def test_a_budget_beyond_what_a_cache_can_take_keeps_everything(model, calibration, preset):
    cache = OjaKVCache.from_model(model, OjaKVConfig.preset(preset), bases=calibration, budget="100 KB/token")
    whole = OjaKVCache.from_model(model, OjaKVConfig.preset(preset, rate=1.0), bases=calibration)
    assert cache.compressed_layers()[0].plan.config.rate == 1
    assert held(model, cache) == held(model, whole)


def test_a_budget_that_no_rate_keeps_is_refused(model, calibration):
    for preset, budget, message in (
        (
            "static-joint-pf",
            "1 B/token",
            "no rate keeps within the `budget` of 1 bytes for each token; .* give more bytes",
        ),
        (
            "ojakv-joint",
            f"1 KB/{LENGTH} tokens",
            f"no rate keeps within the `budget` of 1,000 bytes for {LENGTH:,} tokens; give more bytes",
        ),
    ):
        with pytest.raises(UserError, match=message):
            OjaKVCache.from_model(model, OjaKVConfig.preset(preset), bases=calibration, budget=budget)


def test_rows_of_several_layers_keep_within_less_than_rows_of_each_could():
    """The last of four layers has a row of its own."""
    model = tiny_model(num_hidden_layers=4)
    calibration, length = calibration_of(model, read=True, joint_layers=3), 4096
    plan = plan_for_bytes(
        calibration, OjaKVConfig.preset("joint-mixed"), 0.04, prompt=length, tokens=length, itemsize=4
    )
    assert 0.039 < planned_rate(plan, prompt=length, tokens=length, itemsize=4) <= 0.04
    assert plan.config.rate < 2 / plan.geometry.width


@pytest.mark.parametrize("preset", ["ojakv-joint", "ojakv-pf", "subspace-a", "static-joint-pf"])
@pytest.mark.parametrize("rate", [0.3, 0.7])
def test_bases_pay_from_the_length_that_is_said(model, calibration, preset, rate):
    plan = make_plan(calibration, OjaKVConfig.preset(preset, rate=rate))
    tokens = break_even_tokens(plan, 4)
    uncompressed = plan.geometry.full_nbytes(1, 4)
    assert held(model, OjaKVCache(model, plan), tokens) < tokens * uncompressed
    assert held(model, OjaKVCache(model, plan), tokens - 1) >= (tokens - 1) * uncompressed


def test_a_cache_that_never_pays_has_no_such_length(calibration):
    plan = make_plan(calibration, OjaKVConfig.preset("ojakv-joint", rate=1.0))
    assert break_even_tokens(plan, 4) is None


def test_a_cache_that_keeps_every_prompt_at_full_rank_never_pays(calibration):
    settings = {"update_period": 1, "full_rank_ratio": 1.0, "num_sink_tokens": 0, "recent_window": 0}
    plan = make_plan(calibration, OjaKVConfig.preset("ojakv", rate=0.3, **settings))
    assert break_even_tokens(plan, 4) is None


def test_bases_that_outweigh_what_they_save_are_told():
    wide = tiny_model(hidden_size=256, num_attention_heads=16, num_key_value_heads=16, num_hidden_layers=1)
    calibration = calibration_of(wide, blocks=20)
    config = OjaKVConfig.preset("ojakv-joint", rate=0.8)
    plan = make_plan(calibration, config)
    pays = break_even_tokens(plan, 4)
    taken = planned_rate(plan, prompt=100, tokens=100, itemsize=4)
    with pytest.warns(
        UserWarning, match=f"fewer .* from {pays:,} tokens on, and {taken:.2f} times as many at 100 tokens"
    ) as told:
        OjaKVCache.from_model(wide, config, bases=calibration, expected_tokens=100)
    assert [each.filename for each in told] == [__file__], "it names who calls"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OjaKVCache.from_model(wide, config, bases=calibration, expected_tokens=pays)
        OjaKVCache.from_model(wide, OjaKVConfig.preset("static-joint-pf"), bases=calibration, expected_tokens=1)
    with pytest.raises(UserError, match="`expected_tokens` must be at least 1; got 0"):
        OjaKVCache.from_model(wide, config, bases=calibration, expected_tokens=0)


def test_one_call_tells_of_bases_that_outweigh_what_they_save():
    wide = tiny_model(hidden_size=256, num_attention_heads=16, num_key_value_heads=16, num_hidden_layers=1)
    calibration = calibration_of(wide, blocks=20)
    pays = break_even_tokens(make_plan(calibration, OjaKVConfig.preset("ojakv-joint", rate=0.9)), 4)
    with pytest.warns(UserWarning, match=f"fewer .* from {pays:,} tokens on, and .* at 1,024 tokens; .*`toke") as told:
        lowrank_kv.compress(wide, "ojakv-joint", rate=0.9, bases=calibration)
    assert [each.filename for each in told] == [__file__], "it names who calls"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowrank_kv.compress(wide, "ojakv-joint", rate=0.1, bases=calibration)
        lowrank_kv.compress(wide, "static-joint-pf", rate=0.9, bases=calibration)
