"""Caches that read a text in one batch hold, and answer, what each holds and answers alone."""

import collections

import pytest
import torch
from every_reader import makers_of
from methods import tiny_model

from evaluation.reading import cache_bytes, read_through
from evaluation.rebuilt_once import DecodedRows, RebuiltOnce
from evaluation.shared_prompt import read_prompt_once
from evaluation.side_by_side import read_side_by_side
from lowrank_kv.eviction import Eviction
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.ops.lowrank_attention import Operands, lowrank_attention
from lowrank_kv.ops.scoring import Scoring
from ojakv import OjaKVCache, OjaKVConfig, make_plan

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
def test_rows_that_never_change_are_rebuilt_once_and_others_never(calibration, text, monkeypatch):
    model = tiny_model()
    rebuilt = collections.Counter()

    def count(operands, coef_PNR, rebuild=Operands.rebuilt):
        rebuilt[id(operands.basis_PWR)] += coef_PNR.shape[1]
        return rebuild(operands, coef_PNR)

    makers = {name: make for name, make, _ in makers_of(model, calibration)}
    evicting = OjaKVConfig.preset("static-mixed", rate=1.0, eviction=Eviction(keep_ratio=0.5, window_size=4))
    plan = make_plan(calibration, evicting)
    makers["evicting"] = lambda: OjaKVCache(model, plan)
    rebuilds = {"joint-mixed": True, "rotated-int4": True, "ojakv-pf": False, "kivi-int4": False, "evicting": False}
    for name, is_rebuilt in rebuilds.items():
        cache = makers[name]()
        read_prompt_once(model, text[None, :PROMPT], [cache])
        with monkeypatch.context() as patched:
            patched.setattr(Operands, "rebuilt", count)
            rebuilt.clear()
            read_side_by_side(model, text, [cache], prefix=PROMPT, step=STEP)
        # Tokens that became low rank after the last step's attention are not read any more.
        for layer in cache.layers:
            assert "attends" not in vars(layer), "what holds rebuilt states outlives the reading"
        held = {layer.sequences[0].key.coef.length for layer in cache.layers}
        assert bool(rebuilt) == is_rebuilt, name
        assert all(0 < count <= max(held) for count in rebuilt.values()), name


@torch.no_grad()
@pytest.mark.parametrize("scoring", [Scoring(0.3), Scoring(0.3, softcap=0.5), Scoring(0.3, sink_H=torch.ones(4))])
def test_scores_are_those_of_decode_attention(calibration, text, scoring):
    model = tiny_model()
    cache = {name: make for name, make, _ in makers_of(model, calibration)}["adaptive-mixed"]()
    read_prompt_once(model, text[None, :PROMPT], [cache])
    asked = []
    for layer in cache.layers:
        layer.attends = lambda *given: asked.append(given) or lowrank_attention(*given)
    model(text[None, PROMPT : PROMPT + STEP], past_key_values=cache)
    assert len(asked) == len(cache.layers)
    for query_HQD, tokens, _ in asked:
        found, expected = (
            attend(query_HQD, tokens, scoring) for attend in (RebuiltOnce(DecodedRows()), lowrank_attention)
        )
        torch.testing.assert_close(found, expected, **CLOSE)


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
