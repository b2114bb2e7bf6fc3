"""Caches that read a text in one batch hold, and answer, what each holds and answers alone."""

import pytest
import torch
from every_reader import makers_of
from methods import tiny_model

from evaluation.reading import cache_bytes, read_through
from evaluation.shared_prompt import read_prompt_once
from evaluation.side_by_side import read_side_by_side
from lowrank_kv.hf.geometry import geometry_of

# Products of more rows may be added up in another order, which is 1e-5 here; another code of one coefficient is 1e-3.
CLOSE = {"atol": 5e-5, "rtol": 0}
PROMPT, AFTER, STEP = 192, 46, 9  # hqq packs a multiple of eight rows; the last step is a shorter one


@pytest.fixture(scope="module")
def text():
    return torch.randint(1, 97, (PROMPT + AFTER,), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def test_every_peer_and_preset_that_reads_prompts_exactly(calibration, text):
    model = tiny_model()
    makers = {name: make for name, make, is_exact in makers_of(model, calibration) if is_exact}
    assert len(makers) > 20
    caches = [make() for make in makers.values()]
    read_prompt_once(model, text[None, :PROMPT], caches)
    logits_NSV = read_side_by_side(model, text, caches, prefix=PROMPT, step=STEP)
    assert logits_NSV.shape[:2] == (len(makers), AFTER - 1)
    for (name, make), cache, logits_SV in zip(makers.items(), caches, logits_NSV, strict=True):
        alone = make()
        expected_SV = read_through(model, text, alone, prefix=PROMPT, step=STEP)
        torch.testing.assert_close(
            logits_SV.log_softmax(-1), expected_SV, **CLOSE, msg=lambda m, name=name: f"{name}: {m}"
        )
        assert cache.get_seq_length() == alone.get_seq_length() == len(text)
        layers = geometry_of(model).layers
        assert cache_bytes(cache, layers) == cache_bytes(alone, layers), name


@torch.no_grad()
def test_a_cache_goes_on_by_itself(calibration, text):
    """What was read in a batch is the cache's own, to be read on from."""
    model = tiny_model()
    makers = {name: make for name, make, is_exact in makers_of(model, calibration) if is_exact}
    for name in ("full", "joint-mixed", "rotated-int4", "snapkv"):
        pair = [makers[name](), makers["adaptive-mixed"]()]
        read_prompt_once(model, text[None, :PROMPT], pair)
        read_side_by_side(model, text[:-9], pair, prefix=PROMPT, step=STEP)
        alone = makers[name]()
        read_through(model, text[:-9], alone, prefix=PROMPT, step=STEP)
        found, expected = (model(text[None, -9:], past_key_values=cache).logits for cache in (pair[0], alone))
        torch.testing.assert_close(found, expected, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")
