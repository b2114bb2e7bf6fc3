"""A few end-to-end facts on the real demo model."""

import json

import pytest
import torch

import dynakv
from lowrank.hf.calibration import calibrate
from lowrank.hf.loading import load_model, load_tokenizer

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module", autouse=True)
def all_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokens(demo_dir):
    with open(demo_dir.parent / "text/addresses-heldout.jsonl") as file:
        texts = [json.loads(line)["text"] for line in file]
    return load_tokenizer(str(demo_dir))(max(texts, key=len), return_tensors="pt")["input_ids"][:, :2000]


@torch.no_grad()
def test_open_gates_equal_the_uncompressed_model(demo_dir, tokens):
    ids = tokens[:, :200]
    mask = torch.ones_like(ids)
    model = load_model(str(demo_dir))
    logits = model(ids, use_cache=False).logits
    greedy = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    loss = model(ids, labels=ids, use_cache=False).loss
    dynakv.add_compressors(model, dynakv.DynaKVConfig())
    for layer in dynakv.compressors(model).values():
        for compressor in (layer.key, layer.value):
            # Any orthonormal basis will do when nothing is truncated.
            torch.nn.init.orthogonal_(compressor.projection.weight)
    dynakv.open_gates(model)
    dynakv.use_ragged_cache(model)
    torch.testing.assert_close(model(ids, use_cache=False).logits, logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(model(ids).logits, logits, atol=1e-4, rtol=0)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False), greedy)
    model.train()
    assert float(model(ids, labels=ids).loss) == pytest.approx(float(loss), abs=1e-5)


@pytest.fixture(scope="module")
def compressed(demo_dir, tokens):
    """PCA bases, and gates at about the rate of a trained compressor, their ranks different from token to token."""
    torch.manual_seed(0)
    model = load_model(str(demo_dir))
    moments = calibrate(model, tokens[:, :512], progress=False)
    dynakv.add_compressors(model, dynakv.DynaKVConfig())
    dynakv.initialise_from_moments(model, moments)
    for layer in dynakv.compressors(model).values():
        for compressor in (layer.key, layer.value):
            gate = compressor.gate
            gate.weight.data.normal_(std=0.05)
            index = torch.arange(192)
            gate.bias.data.copy_(-((index - 150) ** 2) / 200.0)
    return dynakv.use_ragged_cache(model)


@torch.no_grad()
def test_bytes_on_a_long_prompt_are_rate_times_full_bytes(compressed, tokens):
    cache = compressed(tokens, logits_to_keep=1).past_key_values
    stores = [store for layer in cache.layers for store in (*layer.key_stores, *layer.value_stores)]
    hard_rate = sum(int(store.ranks().sum()) for store in stores) / (len(stores) * 2000 * 192)
    assert len({int(rank) for store in stores for rank in store.ranks().unique()}) > 3, "ranks must differ"
    held = sum(tensor.untyped_storage().nbytes() for tensor in cache.tensors())
    assert cache.nbytes == held
    assert cache.full_nbytes == 2000 * 30 * 2 * 192 * 4
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
