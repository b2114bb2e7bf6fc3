"""Models that read images: their tokens have positions in time, height and width, and layers are told others, or none."""

import copy

import pytest
import torch
from families import SIZES
from transformers import DynamicCache, Qwen3VLConfig, Qwen3VLForConditionalGeneration

import dynakv
import lowrank_kv
from ojakv import Calibration, OjaKVCache, OjaKVConfig, make_plan

TEXT = SIZES | {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def stock():
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=TEXT, vision_config=VISION)).eval()


@pytest.fixture(params=["dynakv", "static-joint-pf"])
def model_and_cache(request, stock):
    """A model with a cache that drops nothing."""
    model = copy.deepcopy(stock)
    if request.param == "dynakv":
        dynakv.add_compressors(model, dynakv.DynaKVConfig(rank_policy="gate"))
        dynakv.open_gates(model)
        dynakv.use_dynakv_cache(model)
        return model, dynakv.DynaKVCache.from_model(model)
    ids = torch.randint(1, 97, (4, 32), generator=torch.Generator().manual_seed(1))
    config = OjaKVConfig.preset(request.param, rate=1.0, recent_window=4, update_period=2)
    return model, OjaKVCache(model, make_plan(Calibration.from_text(model, ids, progress=False), config))


def positions(length: int, image: slice) -> torch.Tensor:
    """(4, 1, T): of text, in time, height and width; an image of four by four tokens takes four positions."""
    text = torch.arange(length)
    axes = text.repeat(4, 1)
    axes[1:, image.stop :] -= 12
    place = torch.arange(16)
    axes[1:, image] = image.start + torch.stack([torch.zeros(16, dtype=torch.long), place // 4, place % 4])
    return axes[:, None]


@torch.no_grad()
def check(stock, model, cache, calls):
    """Read the same calls, (ids, positions or None) each, with both caches."""
    full = DynamicCache(config=stock.config)
    for ids, at in calls:
        at = {} if at is None else {"position_ids": at}
        expected = stock(input_ids=ids, past_key_values=full, **at).logits
        found = model(input_ids=ids, past_key_values=cache, **at).logits
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("start", [4, 34])
def test_keys_of_images_keep_their_rotations(stock, model_and_cache, start):
    """In a first prompt, and in a later turn behind text, whose positions were kept until then."""
    ids = torch.randint(1, 97, (1, 70), generator=torch.Generator().manual_seed(2))
    at = positions(70, slice(start, start + 16))
    bounds = [0, 30, 31, 32, 60, *range(61, 71)]
    calls = [(ids[:, a:b], at[..., a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    check(stock, *model_and_cache, calls)
    history = model_and_cache[1].layers[0].history
    assert history.keeps_rows
    model_and_cache[1].reset()
    assert not history.keeps_rows


def test_a_turn_may_be_told_no_positions(stock, model_and_cache):
    ids = torch.randint(1, 97, (1, 40), generator=torch.Generator().manual_seed(3))
    text = torch.arange(40).repeat(4, 1)[:, None]
    three = text[1:]  # the form in which the layers of this family are told none
    calls = [(ids[:, :20], text[..., :20]), (ids[:, 20:36], three[..., 20:36])]
    check(stock, *model_and_cache, calls + [(ids[:, i : i + 1], three[..., i : i + 1]) for i in range(36, 40)])


def test_a_plain_call_fills_a_compressed_cache(stock):
    model = copy.deepcopy(stock)
    ids = torch.randint(1, 97, (4, 32), generator=torch.Generator().manual_seed(1))
    bases = Calibration.from_text(model, ids, progress=False)
    lowrank_kv.compress(model, "static-joint-pf", rate=1.0, bases=bases)
    with torch.no_grad():
        found, expected = model(input_ids=ids[:1]), stock(input_ids=ids[:1])
        assert model(input_ids=ids[:1], use_cache=False).past_key_values is None
    assert isinstance(found.past_key_values, OjaKVCache)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=0)


def test_the_decoder_keeps_the_attention_that_was_chosen_for_it(stock):
    model = copy.deepcopy(stock)
    model.set_attn_implementation({"": "sdpa", "text_config": "eager"})
    ids = torch.randint(1, 97, (4, 32), generator=torch.Generator().manual_seed(1))

    def names():
        return [
            each._attn_implementation for each in (model.config, model.config.text_config, model.config.vision_config)
        ]

    before = names()
    lowrank_kv.compress(model, "static-joint-pf", bases=Calibration.from_text(model, ids, progress=False))
    assert model.model.language_model.layers[0].self_attn.lowrank_kv.previous == "eager"
    lowrank_kv.uncompress(model)
    assert names() == before == ["sdpa", "eager", "sdpa"]
