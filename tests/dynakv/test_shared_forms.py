"""Caches of one compressor share the forms of its weights that compiled code reads, until these change."""

import copy
import gc
import weakref

import pytest
import torch
from methods import dynakv_model, spread_gates, tiny_model
from torch import Tensor

import dynakv
from lowrank_kv.ops.native.library import library
from lowrank_kv.utils.derived import derived_from


@pytest.fixture
def model():
    if library() is None:
        pytest.skip("there is no compiled code")
    model = tiny_model().to(torch.bfloat16)
    dynakv_model(model, 0.4)
    spread_gates(model)
    return model


def filled(model):
    cache = dynakv.DynaKVCache.from_model(model)
    ids = torch.randint(1, 97, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = [model(part, past_key_values=cache).logits for part in ids.split([18, 1, 1], dim=1)]
    return cache, torch.cat(logits, dim=1)


def addresses(cache):
    sides = [side for layer in cache.compressed_layers() for side in layer._encoder._sides]
    return {tensor.data_ptr() for side in sides for tensor in side if tensor is not None}


def test_two_caches_share_their_encoders_weights(model):
    one, other = filled(model)[0], filled(model)[0]
    assert addresses(one) == addresses(other)


@pytest.mark.parametrize("how", ["in place", "without a trace"])
def test_a_cache_that_is_made_after_training_encodes_by_its_weights(model, how):
    earlier, before = filled(model)
    kept = addresses(earlier)
    for side in dynakv.token_compressors(model):
        with torch.no_grad():
            bias = side.gate.bias if how == "in place" else side.gate.bias.data
            bias.add_(torch.linspace(3, -3, len(bias)))
    cache, after = filled(model)
    assert not torch.equal(after, before)
    assert addresses(cache) - kept
    assert addresses(earlier) == kept
    twin = copy.deepcopy(model)
    assert torch.equal(filled(twin)[1], after)


def test_copies_share_nothing(model):
    cache, _ = filled(model)
    assert not addresses(cache) & addresses(filled(copy.deepcopy(model))[0])


def decoders_read(cache) -> list[Tensor]:
    """The tensors in which compiled code finds the decoders of each layer, of keys and of values."""
    kept = [each for layer in cache.compressed_layers() for each in layer._decoders.compiled()._keepalive]
    return [each._keepalive for each in kept if each is not None]  # only plans of bits have columns


def are_same(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    return [a is b for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("cache_dtype", ["model", "int8"])
def test_two_caches_share_copies_of_their_decoders_until_these_change(model, cache_dtype):
    if cache_dtype != "model":
        dynakv.configure(model, cache_dtype=cache_dtype)
    (one, before), (other, _) = filled(model), filled(model)
    shared = decoders_read(one)
    assert all(are_same(shared, decoders_read(other)))
    for side in dynakv.token_compressors(model):
        with torch.no_grad():
            side.projection.weight.mul_(2)
            side.gate.weight.mul_(-1)
    later, after = filled(model)
    assert not torch.equal(after, before)
    assert not any(are_same(shared, decoders_read(later)))
    assert all(are_same(shared, decoders_read(one)))


def test_copies_of_decoders_go_with_the_decoders(model):
    cache, _ = filled(model)
    copies = [
        weakref.ref(tensor)
        for layer in cache.compressed_layers()
        for tensor in derived_from(layer._decoders.key_CC).values()
    ]
    assert len(copies) == 3
    del cache
    gc.collect()
    assert all(copy() is not None for copy in copies), "the compressor still has the decoders"
    dynakv.detach(model)
    gc.collect()
    assert not any(copy() is not None for copy in copies)


def test_a_scaled_decoder_made_in_inference_mode_serves_passes_with_gradients():
    model = tiny_model()
    dynakv_model(model, 0.4, cache_dtype="int8")
    ids = torch.randint(1, 97, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        model(ids, past_key_values=dynakv.DynaKVCache.from_model(model))
    layer = dynakv.DynaKVCache.from_model(model).compressed_layers()[0]
    decoder_CC = layer.codec.value.decoder(torch.float32, torch.device("cpu"))
    coef_TC = torch.ones(2, len(decoder_CC), requires_grad=True)
    (coef_TC @ decoder_CC).sum().backward()
    torch.testing.assert_close(coef_TC.grad, decoder_CC.sum(dim=1).expand(2, -1))
