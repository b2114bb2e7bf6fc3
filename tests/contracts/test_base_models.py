"""Compression is put on a whole model or on the base model within, and taken off by either."""

import pytest
import torch
from methods import METHODS, calibration_of, tiny_model
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

import lowrank_kv
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache


@pytest.fixture
def ids():
    return torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(5))


def generate(model, ids, **settings):
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, **settings)


@pytest.mark.parametrize("method", [m for m in METHODS if m.name in ("dynakv", "ojakv-joint")], ids=lambda m: m.name)
def test_generate_is_stock_again_once_the_base_is_restored(method, ids):
    model = tiny_model()
    stock = generate(model, ids)
    method.build(model, 0.3)()
    lowrank_kv.uncompress(model.model)
    result = generate(model, ids, return_dict_in_generate=True)
    assert type(result.past_key_values) is DynamicCache
    assert torch.equal(result.sequences, stock)
    config = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=0)
    # Left to itself, its cache takes most of the machine's memory.
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    said = model.generate_batch(ids[:1].tolist(), generation_config=config, continuous_batching_config=small)
    assert [len(each.generated_tokens) for each in said.values()] == [2]
    assert not {"init_continuous_batching", "_prepare_cache_for_generation"} & model.__dict__.keys()


@pytest.mark.parametrize("implementation", [None, "static"])
def test_generate_around_a_compressed_base_says_to_compress_the_whole(implementation, ids):
    model, calibration = tiny_model(), calibration_of(tiny_model())
    lowrank_kv.compress(model.model, "ojakv-joint", bases=calibration, rate=0.3)
    with pytest.raises(UserError, match="Cache, which would bypass .*; compress the whole model if generate"):
        generate(model, ids, cache_implementation=implementation)
    assert isinstance(model.model(ids).past_key_values, OjaKVCache)
    lowrank_kv.compress(model, "ojakv-joint", bases=calibration, rate=0.3)
    result = generate(model, ids, return_dict_in_generate=True)
    assert isinstance(result.past_key_values, OjaKVCache)
    with pytest.raises(UserError, match="DynamicCache, which would bypass the compressor of this model; leave it out"):
        model(ids, past_key_values=DynamicCache(config=model.config))
