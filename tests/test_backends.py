"""The attention underneath is the one the model was loaded with."""

import pytest
import torch
from methods import METHODS, calibration_of, tiny_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowrank.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig

PICKED = [method for method in METHODS if method.name in ("ojakv-pf", "ojakv-pf-reconstruct", "ojakv-joint", "dynakv")]


@torch.no_grad()
def logits_on(backend: str, method) -> torch.Tensor:
    ids = torch.randint(1, 97, (2, 60), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    model = tiny_model(attn_implementation=backend)
    assert model.config._attn_implementation == backend
    cache = method.build(model, 0.4)()
    seen, logits = 0, []
    for part in ids.split([30, 1, 1, 20, 8], dim=1):
        seen += part.shape[1]
        logits.append(model(part, attention_mask=mask[:, :seen], past_key_values=cache).logits)
    return torch.cat(logits, dim=1)[mask.bool()]


@pytest.mark.parametrize("method", PICKED, ids=lambda method: method.name)
def test_eager_runs_where_it_was_asked_for(method, monkeypatch):
    expected = logits_on("sdpa", method)

    def refuse(*args, **kwargs):
        raise AssertionError("sdpa ran underneath a model loaded with eager attention")

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", refuse)
    torch.testing.assert_close(logits_on("eager", method), expected, atol=1e-4, rtol=0)


@pytest.fixture
def flash(monkeypatch):
    """A function that puts a stand-in with flash attention's contract (causal, two-dimensional padding mask), which itself
    needs a GPU, in sdpa's place; and the masks the stand-in was called with."""
    calls = []

    def stand_in(module, query, key, value, attention_mask, **kwargs):
        calls.append(attention_mask)
        assert attention_mask is None or attention_mask.shape == (query.shape[0], key.shape[2])
        queries, tokens = query.shape[2], key.shape[2]
        mask = torch.arange(tokens) <= torch.arange(tokens - queries, tokens)[:, None]
        mask = mask[None, None].expand(query.shape[0], 1, -1, -1)
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :]
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        scores = (query @ key.mT * kwargs["scaling"]).masked_fill(~mask, torch.finfo(query.dtype).min)
        return (scores.softmax(dim=-1) @ value).transpose(1, 2), None

    return lambda: monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", stand_in_for_sdpa(stand_in)), calls


@pytest.mark.parametrize("method", PICKED, ids=lambda method: method.name)
def test_flash_is_told_of_padding_and_nothing_else(method, flash):
    expected = logits_on("sdpa", method)
    put_in_place, calls = flash
    put_in_place()
    torch.testing.assert_close(logits_on("sdpa", method), expected, atol=1e-4, rtol=0)
    assert any(mask is not None for mask in calls), "the padded prompt must have reached the backend"


@torch.no_grad()
@pytest.mark.parametrize("layout", [{}, {"layout": "per_head", "rope": "post"}], ids=["joint", "per_head"])
def test_flash_is_given_what_eviction_left_in_order(layout, flash):
    """It knows no places, only that what comes later is newer."""
    ids = torch.randint(1, 97, (1, 100), generator=torch.Generator().manual_seed(5))
    logits = []
    for prepare in (lambda: None, flash[0]):
        model = tiny_model()
        prepare()
        config = OjaKVConfig(rate=1.0, prefill="reconstructed", eviction={"keep": 0.5, "window": 8}, **layout)
        cache = OjaKVCache.from_model(model, config, bases=calibration_of(model))
        logits.append(torch.cat([model(part, past_key_values=cache).logits for part in ids.split([60, 40], dim=1)], 1))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)


def stand_in_for_sdpa(flash):
    """Send sdpa's calls through the flash adapter, since transformers refuses to load a model for a backend it lacks."""
    from lowrank.hf.backends import _flash

    def call(module, query, key, value, mask, **kwargs):
        saved = ALL_ATTENTION_FUNCTIONS._global_mapping.get("flash_attention_2")
        ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = flash
        try:
            return _flash(module, query, key, value, mask, **kwargs)
        finally:
            ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = saved

    return call


def test_another_attention_is_refused():
    model = tiny_model()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UserError, match="cannot run on `attn_implementation='flex_attention'`; .* sdpa, eager"):
        PICKED[0].build(model, 1.0)
