"""Caches of one compressor share the forms of its weights that compiled code reads, until these change."""

import copy

import pytest
import torch
from methods import dynakv_model, spread_gates, tiny_model

import dynakv
from lowrank_kv.ops.native.library import library


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
    for side in dynakv.cache.token_compressors(model):
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
