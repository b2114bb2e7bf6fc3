"""Caches of compressors: what of these a new one follows, and when the layers of a learned plan compress."""

import pytest
import torch
from methods import dynakv_model, planned_model, tiny_model

import dynakv
from dynakv.config import DynaKVConfig
from lowrank_kv.utils.errors import UserError


@pytest.mark.parametrize("make", [dynakv_model, planned_model], ids=["gates", "plan"])
@torch.no_grad()
def test_a_new_cache_follows_parameters_that_were_written_past_their_versions(make):
    """As averages of weights are, by `parameter.data`."""
    model, ids = tiny_model(), torch.randint(1, 97, (1, 40), generator=torch.Generator().manual_seed(4))
    make(model, 0.5)

    def last_logits():
        cache = model(ids[:, :30], use_cache=True).past_key_values
        return model(ids[:, 30:], past_key_values=cache).logits

    before = last_logits()
    projections = [compressor.projection for compressor in dynakv.token_compressors(model)]
    kept = [projection.weight.clone() for projection in projections]
    for projection in projections:
        projection.weight.data += 0.05 * torch.randn_like(projection.weight)
    assert not torch.equal(last_logits(), before)
    for projection, weight in zip(projections, kept, strict=True):
        projection.weight.data.copy_(weight)
    assert torch.equal(last_logits(), before)
    for projection, weight in zip(projections, kept, strict=True):
        projection.weight.data.copy_(weight.T)
    assert not torch.equal(last_logits(), before), "the same numbers in another order"


@torch.no_grad()
def test_a_new_cache_follows_the_start_and_what_own_directions_are_weighed_by():
    """All that an exported compressor has is in buffers."""
    model, ids = tiny_model(), torch.randint(1, 97, (1, 160), generator=torch.Generator().manual_seed(4))
    planned_model(model, 0.3, own_directions=4, own_directions_from=16)

    def last_logits():
        cache = model(ids[:, :150], use_cache=True).past_key_values
        return model(ids[:, 150:], past_key_values=cache).logits

    found = [last_logits()]
    for compressor in dynakv.token_compressors(model):
        compressor.gate.importance.copy_(compressor.gate.importance.flip(0))
    found.append(last_logits())
    for compressor in dynakv.token_compressors(model):
        compressor.projection.start.copy_(compressor.projection.start.flip(1))  # other coefficients are kept
        compressor.projection.start_inverse.copy_(compressor.projection.start_inverse.flip(0))
    found.append(last_logits())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


@pytest.mark.parametrize(("staggered", "most"), [(True, 1), (False, 3)])
@torch.no_grad()
def test_layers_take_turns(staggered, most):
    """So that no token takes the time of all, and tokens are exact for as long on average wherever they stand."""
    model, ids = (
        tiny_model(num_hidden_layers=3),
        torch.randint(1, 97, (1, 80), generator=torch.Generator().manual_seed(4)),
    )
    planned_model(model, 0.3, staggered=staggered)
    cache, compressed = dynakv.DynaKVCache.from_model(model), []
    model(ids[:, :50], past_key_values=cache)
    for at in range(50, 80):
        before = [layer.sequences[0].positions.num_low_rank for layer in cache.layers]
        model(ids[:, at : at + 1], past_key_values=cache)
        after = [layer.sequences[0].positions.num_low_rank for layer in cache.layers]
        compressed.append([now - then for now, then in zip(after, before, strict=True)])
    assert max(sum(count > 0 for count in each) for each in compressed) == most
    assert {count for each in compressed[4:] for count in each} == {0, 4}


def test_layers_take_turns_unless_they_are_told_otherwise():
    config = DynaKVConfig(rank_policy="plan")
    assert config.windowed.staggered
    assert not config.overridden(staggered=False).windowed.staggered
    with pytest.raises(UserError, match="`staggered` must be left out where `rank_policy` is gate: no token waits"):
        DynaKVConfig(rank_policy="gate", staggered=False)
