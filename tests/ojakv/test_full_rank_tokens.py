"""Which tokens of an OjaKV cache stay whole: sinks, recent ones, what is chosen of a prompt, and what a prompt is."""

import pytest
import torch
from online_caches import PER_HEAD, filled, full_rank_positions

from ojakv import OjaKVCache, OjaKVConfig


def test_sinks_and_recent_tokens_stay_whole(model, calibration, ids):
    settings = {"num_sink_tokens": 3, "recent_window": 5, "update_period": 4, "staggered": False}
    cache = filled(model, calibration, ids[:, :40], 40, **settings)
    assert full_rank_positions(cache) == [0, 1, 2, 35, 36, 37, 38, 39]
    for tokens, first_waiting in ((44, 35), (45, 39), (48, 39), (49, 43)):
        cache = filled(model, calibration, ids[:, :tokens], 40, **settings)
        # Four have become too old once 44 tokens are there, and leave with the next: a call's own tokens are held.
        assert full_rank_positions(cache) == [0, 1, 2, *range(first_waiting, tokens)]


def test_a_prompt_too_short_to_compress_waits_for_a_full_period(model, calibration, ids):
    settings = {"num_sink_tokens": 3, "recent_window": 5, "update_period": 4, "staggered": False}
    # With 12 tokens a period is full; it leaves when the next token comes, which is held.
    for tokens, whole in ((8, 8), (12, 12), (13, 9), (16, 12), (17, 9)):
        cache = filled(model, calibration, ids[:, :tokens], 6, **settings)
        assert len(full_rank_positions(cache)) == whole
        assert full_rank_positions(cache)[:3] == [0, 1, 2]


def test_the_tokens_of_largest_weighted_residual_stay_whole(model, calibration, ids):
    seen = {}

    def spy(module, query, key, value, mask, **kwargs):
        seen.update(query=query[0], key=key[0], scaling=kwargs["scaling"])
        return original(module, query, key, value, mask, **kwargs)

    from lowrank_kv.hf.backends import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = spy
    try:
        settings = {"num_sink_tokens": 0, "recent_window": 0, "full_rank_ratio": 0.1, "observation_window": 8}
        cache = filled(model, calibration, ids[:1, :60], 60, **PER_HEAD, **settings)
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = original
    side = cache.layers[2].sequences[0].key
    basis, key, query = side.basis_PWR, seen["key"], seen["query"]
    residual = key - key @ basis @ basis.mT
    error = torch.zeros(60)
    for token in range(60):
        late = [position for position in range(52, 60) if position >= token]
        dots = [query[head, position] @ residual[head // 2, token] for head in range(4) for position in late]
        error[token] = torch.stack(dots).abs().mean() * seen["scaling"]
    assert sorted(error.topk(6).indices.tolist()) == full_rank_positions(cache, layer=2)


def test_neighbouring_scores_are_averaged_before_the_choice(model, calibration, ids):
    settings = {"num_sink_tokens": 0, "recent_window": 0, "full_rank_ratio": 0.1, **PER_HEAD}
    single = filled(model, calibration, ids[:1, :60], 60, **settings)
    pooled = filled(model, calibration, ids[:1, :60], 60, score_pool=5, **settings)
    assert full_rank_positions(single) != full_rank_positions(pooled)
    assert len(full_rank_positions(pooled)) == 6


def test_every_token_is_stored_once(model, calibration, ids):
    cache = filled(model, calibration, ids, 120, full_rank_ratio=0.1, update_period=8)
    for layer in cache.compressed_layers():
        for sequence in layer.sequences:
            low, whole = sequence.positions.low_rank().tolist(), sequence.positions.full_rank.rows.tolist()
            assert sorted(low + whole) == list(range(150))
            assert sequence.key.coef.length == sequence.value.coef.length == len(low)
            assert sequence.key.full.length == sequence.value.full.length == len(whole)


@torch.no_grad()
def test_padding_is_not_stored(model, calibration, ids):
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :20] = 0
    cache = OjaKVCache.from_model(model, OjaKVConfig(rate=0.5), bases=calibration)
    model(ids[:, :60], attention_mask=mask, past_key_values=cache)
    first, second = cache.layers[0].sequences
    assert first.key.coef.length == 60 - 4 - 16
    assert second.key.coef.length == 40 - 4 - 16
    assert second.positions.padding.tolist() == list(range(20))


def test_a_whole_prompt_stays_and_what_is_generated_is_compressed(model, calibration, ids):
    for prompt in (50, 10):
        settings = {"keep_prompt_full_rank": True, "recent_window": 20, "update_period": 10, "staggered": False}
        cache = filled(model, calibration, ids, prompt, **settings)
        # 20 recent ones, and ten that have waited a full period but leave with the next token only.
        assert full_rank_positions(cache) == [*range(prompt), *range(120, 150)]
        assert cache.layers[0].sequences[0].positions.low_rank().tolist() == list(range(prompt, 120))


@pytest.mark.parametrize("chunk", [None, 8, 17, 25, 59])
@pytest.mark.parametrize("drafts", [None, 3])
def test_a_prompt_of_generate_stays_whole_in_whatever_chunks_it_comes(model, calibration, ids, chunk, drafts):
    """A second row is padded, its first chunks altogether where they are short; drafts come to one row alone."""
    prompts, mask = ids[:2, :60].clone(), torch.ones(2, 60, dtype=torch.long)
    prompts[1, :26], mask[1, :26] = 0, 0
    if drafts:
        prompts, mask = prompts[:1], mask[:1]
    config = OjaKVConfig(rate=0.5, keep_prompt_full_rank=True, recent_window=4, update_period=4)
    cache = OjaKVCache.from_model(model, config, bases=calibration)
    model.generate(
        prompts,
        attention_mask=mask,
        max_new_tokens=24,
        min_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
        past_key_values=cache,
        prefill_chunk_size=chunk,
        prompt_lookup_num_tokens=drafts,
    )
    for sequence, begin in zip(cache.layers[0].sequences, (0, 26), strict=False):
        whole = sequence.positions.full_rank.rows.tolist()
        assert whole[: 60 - begin] == list(range(begin, 60))
        low = sequence.positions.low_rank().tolist()
        assert len(low) >= 12
        assert low == list(range(60, 60 + len(low)))


def test_accepted_drafts_are_no_prompt(model, calibration, ids):
    """The first call of prompt lookup reads drafts with the prompt."""
    [text] = model.generate(ids[:1, :36], max_new_tokens=60, min_new_tokens=60, do_sample=False, pad_token_id=0)
    prompt = torch.cat([text[30:44], text[:36]])[None]  # what comes next stands in it
    config = OjaKVConfig(rate=0.5, keep_prompt_full_rank=True, recent_window=0, update_period=4)
    cache = OjaKVCache.from_model(model, config, bases=calibration)
    with_drafts = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
    model.generate(
        prompt,
        max_new_tokens=16,
        min_new_tokens=16,
        do_sample=False,
        pad_token_id=0,
        past_key_values=cache,
        **with_drafts,
    )
    sequence = cache.layers[0].sequences[0]
    assert sequence.num_pinned == 50
    assert len(sequence.positions.low_rank())


@pytest.mark.parametrize("settings", [{"keep_prompt_full_rank": True}, {"full_rank_ratio": 0.25}])
def test_turns_after_drafts_choose_by_their_own_queries(model, calibration, ids, settings):
    """A prompt that ended with its first token is still held when the next comes."""
    config = OjaKVConfig(rate=0.5, recent_window=0, num_sink_tokens=0, update_period=4, **settings)
    cache = OjaKVCache.from_model(model, config, bases=calibration)
    common = {"do_sample": False, "pad_token_id": 0, "past_key_values": cache}
    first = model.generate(ids[:1, :40], max_new_tokens=1, prompt_lookup_num_tokens=3, **common)
    model.generate(torch.cat([first, ids[:1, 40:100]], dim=1), max_new_tokens=2, **common)
    whole = full_rank_positions(cache)
    assert max(whole) >= 60
    assert len([place for place in whole if place < 101]) == (101 if "keep_prompt_full_rank" in settings else 25)


def test_a_prompt_ends_where_it_was_cropped_and_single_tokens_go_on(model, calibration, ids):
    config = OjaKVConfig(rate=0.5, keep_prompt_full_rank=True, recent_window=0, update_period=4)
    common = {"do_sample": False, "pad_token_id": 0}
    cropped, single = (OjaKVCache.from_model(model, config, bases=calibration) for _ in range(2))
    model.generate(ids[:1, :60], max_new_tokens=1, past_key_values=cropped, **common)
    cropped.crop(40 - 60)
    for token in ids[:1, 40:60].split(1, dim=1):
        model(token, past_key_values=cropped)
    text = ids[:1, :40]
    for _ in range(20):
        text = model.generate(text, max_new_tokens=1, past_key_values=single, **common)
    for cache in (cropped, single):
        sequence = cache.layers[0].sequences[0]
        assert sequence.num_pinned == 40
        assert len(sequence.positions.low_rank()) >= 12


def test_drafts_of_one_turn_say_nothing_of_the_next(model, calibration, ids):
    config = OjaKVConfig(rate=0.5, keep_prompt_full_rank=True, recent_window=0, update_period=4)
    cache = OjaKVCache.from_model(model, config, bases=calibration)
    common = {"do_sample": False, "pad_token_id": 0, "past_key_values": cache}
    first = model.generate(ids[:1, :40], max_new_tokens=12, min_new_tokens=12, prompt_lookup_num_tokens=3, **common)
    both = torch.cat([first, ids[:1, 40:80]], dim=1)
    model.generate(both, max_new_tokens=12, min_new_tokens=12, **common)
    whole = set(full_rank_positions(cache))
    assert set(range(40)) <= whole
    assert set(range(52, 92)) <= whole


def test_what_stays_of_a_prompt_stays_of_every_chunk_and_turn(model, calibration, ids):
    """A chunk is more than 16 tokens; decoded ones in between are compressed as ever."""
    calls = ids.split([50, 40, *[1] * 20, 40], dim=1)
    for settings, expected in (
        ({"keep_prompt_full_rank": True}, {*range(90), *range(110, 150)}),
        ({"full_rank_ratio": 0.2, "num_sink_tokens": 0, "recent_window": 0}, None),
    ):
        config = OjaKVConfig(**{"rate": 0.5, "update_period": 10, "recent_window": 0, "staggered": False, **settings})
        cache = OjaKVCache.from_model(model, config, bases=calibration)
        whole = []
        for call in calls:
            model(call, past_key_values=cache)
            whole.append(set(full_rank_positions(cache)))
        if expected:
            assert whole[-1] == expected
        else:
            first, second, third = (
                len(whole[-1] & set(places)) for places in (range(50), range(50, 90), range(90, 150))
            )
            # Of the last, with it, the ten that still waited.
            assert (first, second, third) == (10, 8, 10)


def test_a_cache_cropped_to_nothing_starts_again(model, calibration, ids):
    cache, fresh = (filled(model, calibration, ids, prompt, full_rank_ratio=0.1) for prompt in (100, 60))
    cache.crop(-150)
    model(ids[:, :60], past_key_values=cache)
    for token in ids[:, 60:].split(1, dim=1):
        model(token, past_key_values=cache)
    held, expected = (c.layers[1].sequences[0] for c in (cache, fresh))
    assert (held.num_pinned, held.positions.full_rank.length) == (
        expected.num_pinned,
        expected.positions.full_rank.length,
    )
    assert held.positions.full_rank.rows[:4].tolist() == [0, 1, 2, 3]


def test_first_tokens_that_were_cropped_are_kept_again(model, calibration, ids):
    cache = OjaKVCache.from_model(model, OjaKVConfig(rate=0.5), bases=calibration)
    for part in (ids[:, :60], ids[:, 60:120]):
        model(part, past_key_values=cache)
        assert full_rank_positions(cache) == [*range(4), *range(cache.get_seq_length() - 16, cache.get_seq_length())]
        cache.crop(2 - cache.get_seq_length())


def test_an_emptied_cache_holds_no_prompt_for_drafts(model, calibration, ids):
    cache, fresh = (OjaKVCache.from_model(model, OjaKVConfig(rate=0.5), bases=calibration) for _ in range(2))
    cache.activate_past_recording()
    model(ids, past_key_values=cache)
    assert cache.layers[0].sequences[0].key.coef.length == 0
    cache.reset()
    for one in (cache, fresh):
        model(ids, past_key_values=one)
    assert cache.layers[0].sequences[0].key.coef.length == fresh.layers[0].sequences[0].key.coef.length == 130


def test_a_short_sequence_is_not_compressed(model, calibration, ids):
    settings = {"min_length": 100, "num_sink_tokens": 0, "recent_window": 0, "update_period": 10}
    dense = model(ids[:, :99], use_cache=False).logits
    cache = OjaKVCache.from_model(model, OjaKVConfig(rate=0.1, **settings), bases=calibration)
    logits = [model(part, past_key_values=cache).logits for part in ids[:, :99].split([60, 20, 19], dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), dense, atol=1e-4, rtol=0)
    assert cache.layers[0].sequences[0].key.coef.length == 0
    # The hundredth token makes the sequence long enough; it is held until the next comes.
    for token, low in ((99, 0), (100, 100)):
        model(ids[:, token : token + 1], past_key_values=cache)
        assert cache.layers[0].sequences[0].key.coef.length == low
