"""A few end-to-end facts on the real demo model."""

import json

import pytest
import torch

import dynakv
from lowrank_kv.calibration.activation_moments import calibrate
from lowrank_kv.hf.loading import load_model, load_tokenizer
from ojakv import Calibration, OjaKVCache, OjaKVConfig

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def tokens(demo_dir):
    with open(demo_dir.parent / "text/addresses-heldout.jsonl") as file:
        texts = [json.loads(line)["text"] for line in file]
    return load_tokenizer(str(demo_dir))(max(texts, key=len), return_tensors="pt")["input_ids"][:, :1200]


@torch.no_grad()
def test_open_gates_equal_the_uncompressed_model(demo_dir, tokens):
    ids = tokens[:, :200]
    mask = torch.ones_like(ids)
    model = load_model(str(demo_dir))
    stock = model(ids, labels=ids, use_cache=False)
    greedy = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    dynakv.add_compressors(model, dynakv.DynaKVConfig())
    for layer in dynakv.compressors(model).values():
        for compressor in (layer.key, layer.value):
            # Any orthonormal basis will do when nothing is truncated.
            torch.nn.init.orthogonal_(compressor.projection.weight)
    dynakv.open_gates(model)
    dynakv.use_dynakv_cache(model)
    torch.testing.assert_close(model(ids, use_cache=False).logits, stock.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(model(ids).logits, stock.logits, atol=1e-4, rtol=0)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False), greedy)
    model.train()
    assert float(model(ids, labels=ids).loss) == pytest.approx(float(stock.loss), abs=1e-5)


@pytest.fixture(scope="module")
def compressed(demo_dir, tokens):
    """PCA bases, and gates at about the rate of a trained compressor, their ranks different from token to token."""
    torch.manual_seed(0)
    model = load_model(str(demo_dir))
    moments = calibrate(model, tokens[:, :512], progress=False)
    dynakv.add_compressors(model, dynakv.DynaKVConfig())
    dynakv.initialize_from_moments(model, moments)
    for layer in dynakv.compressors(model).values():
        for compressor in (layer.key, layer.value):
            gate = compressor.gate
            gate.weight.data.normal_(std=0.05)
            index = torch.arange(192)
            gate.bias.data.copy_(-((index - 150) ** 2) / 200.0)
    return dynakv.use_dynakv_cache(model)


@torch.no_grad()
def test_bytes_on_a_long_prompt_are_rate_times_full_bytes(compressed, tokens):
    length = 1200
    cache = compressed(tokens[:, :length], logits_to_keep=1).past_key_values
    stores = [store for layer in cache.layers for one in layer.sequences for store in (one.key, one.value)]
    hard_rate = sum(int(store.ranks().sum()) for store in stores) / (len(stores) * length * 192)
    assert len({int(rank) for store in stores for rank in store.ranks().unique()}) > 3, "ranks must differ"
    held = sum(tensor.untyped_storage().nbytes() for _, tensor in cache.tensors_by_kind())
    assert cache.nbytes == held
    assert cache.full_nbytes == length * 30 * 2 * 192 * 4
    assert cache.nbytes == pytest.approx(hard_rate * cache.full_nbytes, rel=0.03)
    assert 0.15 < hard_rate < 0.45


@torch.no_grad()
def test_prefill_and_decode_equal_one_pass_with_the_hard_mask(compressed, tokens):
    ids = tokens[:, :120]
    whole = compressed(ids, use_cache=False).logits
    cache = dynakv.DynaKVCache.from_model(compressed)
    steps = [ids[:, :100], *ids[:, 100:].split(1, dim=1)]
    logits = torch.cat([compressed(step, past_key_values=cache).logits for step in steps], dim=1)
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def calibrated(demo_dir, tokens):
    model = load_model(str(demo_dir))
    return model, Calibration.from_text(model, tokens[:, :512], progress=False)


ANSWER = {"max_new_tokens": 40, "do_sample": False}


@pytest.fixture(scope="module")
def prompt(tokens):
    ids = tokens[:, :150]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture(scope="module")
def answer(calibrated, prompt):
    """What the uncompressed model answers."""
    return calibrated[0].generate(**prompt, **ANSWER)


@torch.no_grad()
@pytest.mark.parametrize("preset", ["ojakv", "ojakv-pf", "ojakv-joint"])
def test_online_bases_at_full_rank_equal_the_uncompressed_model(calibrated, prompt, answer, preset):
    model, calibration = calibrated
    config = OjaKVConfig.preset(preset, rate=1.0)
    cache = OjaKVCache.from_model(model, config, bases=calibration)
    assert torch.equal(model.generate(**prompt, past_key_values=cache, **ANSWER), answer)
    assert cache.updates > 60, "the bases must have followed the text"


@torch.no_grad()
def test_online_joint_bases_lose_little_on_a_real_text(calibrated, tokens):
    # Calibrated on 512 tokens of the same address; a fixed basis of the same rate loses several times as much.
    model, calibration = calibrated
    ids, targets = tokens[:, :1100], tokens[0, 1024:1100]
    full = model(ids, use_cache=False, logits_to_keep=77).logits[0, :-1]
    losses = {"full": torch.nn.functional.cross_entropy(full, targets)}
    for name, changes in {"online": {}, "fixed": {"tracker": "fixed"}}.items():
        cache = OjaKVCache.from_model(model, OjaKVConfig.preset("ojakv-joint", rate=0.25, **changes), bases=calibration)
        logits = [model(ids[:, :1024], past_key_values=cache, logits_to_keep=1).logits[0]]
        logits += [model(part, past_key_values=cache).logits[0] for part in ids[:, 1024:].split(16, dim=1)]
        losses[name] = torch.nn.functional.cross_entropy(torch.cat(logits)[:-1], targets)
        assert cache.rate < 0.4
    assert losses["online"] - losses["full"] < 0.1
    assert losses["online"] < losses["fixed"]
