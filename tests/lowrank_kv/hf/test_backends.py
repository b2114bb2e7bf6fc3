"""The attention underneath is the one the model was loaded with."""

import pytest
import torch
import transformers.modeling_flash_attention_utils as utils
from methods import METHODS, calibration_of, tiny_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowrank_kv.hf import backends
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig

PICKED = [
    method for method in METHODS if method.name in ("ojakv-pf", "ojakv-pf-reconstructed", "ojakv-joint", "dynakv")
]


@torch.no_grad()
def logits_on(backend: str, method) -> torch.Tensor:
    ids = torch.randint(1, 97, (2, 110), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    model = tiny_model(attn_implementation=backend)
    assert model.config._attn_implementation == backend
    cache = method.build(model, 0.4)()
    seen, logits = 0, []
    # More tokens are compressed than a basis has directions: a step by fewer of them multiplies what differs by rounding.
    for part in ids.split([80, 1, 1, 20, 8], dim=1):
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


def causal_attention(query_QHD, key_TGD, value_TGD, softmax_scale, window=-1):
    """The last query aligned with the last key, as flash attention has it; it sees `window` tokens before its own."""
    queries, tokens, repeats = len(query_QHD), len(key_TGD), query_QHD.shape[1] // key_TGD.shape[1]
    key_HTD, value_HTD = (states.repeat_interleave(repeats, dim=1).transpose(0, 1) for states in (key_TGD, value_TGD))
    before = torch.arange(tokens - queries, tokens)[:, None] - torch.arange(tokens)
    is_seen = (before >= 0) & ((before <= window) | (window < 0))
    scores = (query_QHD.transpose(0, 1) @ key_HTD.mT * softmax_scale).masked_fill(~is_seen, float("-inf"))
    return (scores.softmax(dim=-1) @ value_HTD).transpose(0, 1)


@pytest.fixture
def flash(monkeypatch):
    """A function that sends sdpa's calls through the adapter (transformers refuses to load a model for a backend it lacks)
    and transformers' own flash attention, down to the two functions of the flash-attn package, which need a GPU; and
    which of them were called."""
    calls = []

    def flash_attn_func(query, key, value, softmax_scale, causal, softcap=0.0, dropout_p=0.0, window_size=(-1, -1)):
        assert causal
        calls.append("plain")
        rows = zip(query, key, value, strict=True)
        return torch.stack([causal_attention(*row, softmax_scale, window_size[0]) for row in rows])

    def flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size=(-1, -1),
    ):
        assert causal or max_seqlen_q == 1
        calls.append("padded")
        rows = [
            states.tensor_split(ends[1:-1].tolist()) for states, ends in ((query, cu_seqlens_q), (key, cu_seqlens_k))
        ]
        rows.append(value.tensor_split(cu_seqlens_k[1:-1].tolist()))
        return torch.cat([causal_attention(*row, softmax_scale, window_size[0]) for row in zip(*rows, strict=True)])

    def lazy_imports(implementation, *args, **kwargs):
        assert implementation == "flash_attention_2"
        return flash_attn_func, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input

    def call(module, query, key, value, mask, **kwargs):
        return backends.backend("flash_attention_2")(module, query, key, value, mask, **kwargs)

    def put_in_place():
        monkeypatch.setattr(utils, "_lazy_imports", lazy_imports)
        monkeypatch.setattr(utils, "_loaded_implementation", None)
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", call)

    return put_in_place, calls


@pytest.mark.parametrize("method", PICKED, ids=lambda method: method.name)
def test_flash_is_told_of_padding_and_nothing_else(method, flash):
    expected = logits_on("sdpa", method)
    put_in_place, calls = flash
    put_in_place()
    torch.testing.assert_close(logits_on("sdpa", method), expected, atol=1e-4, rtol=0)
    model = tiny_model()
    make_cache = method.build(model, 0.4)
    with torch.no_grad():
        model(torch.arange(1, 41)[None], past_key_values=make_cache())
    assert set(calls) == {"plain", "padded"}, "the padded prompt must have reached the backend, and what is not padded"


@torch.no_grad()
def test_flash_refuses_what_would_add_to_scores(flash):
    model = tiny_model()
    method = PICKED[-1].build(model, 0.4)
    flash[0]()
    ids = torch.arange(1, 41)[None]
    added = torch.full((40, 40), torch.finfo(torch.float32).min).triu(1)[None, None]
    with pytest.raises(UserError, match="must be boolean for `flash_attention_2`.*got torch.float32"):
        model(ids, attention_mask=added, use_cache=False)
    model(ids, attention_mask=added == 0, past_key_values=method())


@torch.no_grad()
@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "uncached"])
def test_flash_refuses_a_mask_that_hides_more_than_padding_and_later_tokens(flash, is_cached):
    """It would be left out without a word."""
    method = next(method for method in PICKED if method.name == "dynakv")
    model = tiny_model()
    make_cache = method.build(model, 0.4)
    flash[0]()
    ids, place = torch.arange(1, 41)[None], torch.arange(40)
    causal = place <= place[:, None]
    documents = causal & (place // 20 == place[:, None] // 20)

    def read(mask):
        cached = {"past_key_values": make_cache()} if is_cached else {"use_cache": False}
        return model(ids, attention_mask=mask[None, None], **cached).logits

    with pytest.raises(UserError, match="`attention_mask` hides other tokens .* `flash_attention_2`.*sdpa or eager"):
        read(documents)
    with pytest.raises(UserError, match="hides other tokens"):
        read(torch.ones_like(causal))
    torch.testing.assert_close(read(causal), read(causal & (place >= 0)), atol=0, rtol=0)
    padded = causal & (place >= 3)
    assert not torch.equal(read(padded)[:, 3:], read(causal)[:, 3:]), "padding reaches it"


@torch.no_grad()
def test_flash_is_told_of_packed_documents_where_transformers_tells_it(flash):
    """By the positions of a single sequence; those of a batch it does not look at."""
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(5))
    position = torch.cat([torch.arange(15), torch.arange(25)])[None]
    model = tiny_model()
    PICKED[-1].build(model, 0.4)
    expected = model(ids[:1], position_ids=position, use_cache=False).logits
    flash[0]()
    actual = model(ids[:1], position_ids=position, use_cache=False).logits
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    with pytest.raises(UserError, match="hides other tokens"):
        model(ids, position_ids=position.expand(2, -1), use_cache=False)


@torch.no_grad()
def test_flash_is_told_of_a_sliding_window(flash):
    generator = torch.Generator().manual_seed(0)
    model = tiny_model()
    module, query = model.model.layers[0].self_attn, torch.randn(2, 4, 30, 16, generator=generator)
    key, value = torch.randn(2, 2, 2, 30, 16, generator=generator)
    before = torch.arange(30)[:, None] - torch.arange(30)
    mask = ((before >= 0) & (before < 5)).expand(2, 1, -1, -1)
    options = {"scaling": 0.25, "sliding_window": 5}
    expected = backends.backend("sdpa")(module, query, key, value, mask, scaling=0.25)[0]
    flash[0]()
    attend = backends.backend("flash_attention_2")
    torch.testing.assert_close(attend(module, query, key, value, mask, **options)[0], expected, atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="hides other tokens"):
        attend(module, query, key, value, mask, **{**options, "sliding_window": 6})


@torch.no_grad()
@pytest.mark.parametrize("layout", [{}, {"layout": "per_head", "rope": "post"}], ids=["joint", "per_head"])
def test_flash_is_given_what_eviction_left_in_order(layout, flash):
    """It knows no places, only that what comes later is newer."""
    ids = torch.randint(1, 97, (1, 100), generator=torch.Generator().manual_seed(5))
    logits = []
    for prepare in (lambda: None, flash[0]):
        model = tiny_model()
        prepare()
        config = OjaKVConfig(
            rate=1.0, prefill="reconstructed", eviction={"keep_ratio": 0.5, "window_size": 8}, **layout
        )
        cache = OjaKVCache.from_model(model, config, bases=calibration_of(model))
        logits.append(torch.cat([model(part, past_key_values=cache).logits for part in ids.split([60, 40], dim=1)], 1))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)


def test_another_attention_is_refused():
    model = tiny_model()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UserError, match="cannot run on `attn_implementation='flex_attention'`; .* sdpa, eager"):
        PICKED[0].build(model, 1.0)
