"""Every family with every method, and what is refused because a family cannot be served."""

import dataclasses

import pytest
import torch
from families import BY_NAME, FAMILIES
from methods import PLANNED, TOKENWISE, calibration_of, dynakv_model, picked, spread_gates
from transformers import Gemma2PreTrainedModel, GPTNeoConfig, GPTNeoForCausalLM
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dynakv
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.hf.prepare import prepare
from lowrank_kv.hf.rotary import Rotary
from lowrank_kv.utils.errors import UserError

# `test_modes_of_families.py` and `test_compressed_families.py` are quick with other plans.
QUICK = picked("dynakv", "ojakv-joint", "ojakv-pf", "dynakv-tokenwise-plan")
SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in (*PLANNED, TOKENWISE) if method not in QUICK]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
every_method = pytest.mark.parametrize("method", QUICK + SLOW, ids=lambda method: method.name)


@pytest.fixture
def ids():
    return torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(5))


def generate(model, ids, cache=None, **settings):
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids), **settings}
    return model.generate(ids, past_key_values=cache, **settings)


@torch.no_grad()
@every_family
@every_method
def test_full_rank_equals_the_dense_model(family, method, ids):
    model = family.model()
    greedy, beams = generate(model, ids), generate(model, ids, num_beams=3)
    assert len(set(greedy[:, 20:].flatten().tolist())) > 4, "a model that repeats itself would prove little"
    whole = model(greedy, use_cache=False).logits
    make_cache = method.build(model, 1.0)
    assert torch.equal(generate(model, ids, make_cache()), greedy)
    assert torch.equal(generate(model, ids, make_cache(), num_beams=3), beams)
    cache, logits = make_cache(), []
    # A prompt, single tokens, a few at once in the compressed form.
    for part in greedy.split([20, 1, 1, 1, 1, 1, 1, 5, 1], dim=1):
        logits.append(model(part, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, atol=2e-4, rtol=0)


@torch.no_grad()
@every_family
@every_method
def test_a_compressed_left_padded_batch_equals_single_sequences(family, method):
    # More tokens than a preset keeps at full rank.
    ids = torch.randint(1, 97, (2, 48), generator=torch.Generator().manual_seed(5))
    model = family.model()
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :7] = 0
    mask[1, :7] = 0
    dense = generate(model, padded, attention_mask=mask)
    make_cache = method.build(model, 0.1)
    batch = generate(model, padded, make_cache(), attention_mask=mask)
    alone = [generate(model, ids[:1], make_cache()), generate(model, ids[1:, 7:], make_cache())]
    assert torch.equal(batch[0, 48:], alone[0][0, 48:])
    assert torch.equal(batch[1, 48:], alone[1][0, 41:])
    assert not torch.equal(batch, dense), "a tenth of the bytes must change what is said"


@torch.no_grad()
@every_family
@every_method
def test_drafts_change_nothing_at_full_rank(family, method, ids):
    """Compressed layers and, where a family has them, native ones with a window are rolled back together."""
    repetitive = ids[:1, :10].repeat(1, 3)
    model = family.model()
    plain = generate(model, repetitive)
    assert torch.equal(generate(model, repetitive, prompt_lookup_num_tokens=5), plain)
    cache = method.build(model, 1.0)()
    cropped = []
    crop = cache.crop
    cache.crop = lambda count: (cropped.append(int(count)), crop(count))
    assert torch.equal(generate(model, repetitive, cache, prompt_lookup_num_tokens=5), plain)
    assert min(cropped) < 0, "some drafts must have been taken back"
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {30 + 11}


# -- Gemma 2: capped scores --------------------------------------------------------------------------------------


@torch.no_grad()
@every_method
def test_the_cap_is_applied_where_the_backend_underneath_applies_it(method, ids, monkeypatch):
    """Up to transformers 5.17 Gemma 2 may be loaded with sdpa, which ignores the cap; later sdpa refuses it."""

    def capless(module, query, key, value, mask, *, softcap=None, **kwargs):
        assert softcap is not None
        return sdpa(module, query, key, value, mask, **kwargs)

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    family = BY_NAME["gemma2"]
    capped = family.model(attn_implementation="eager")
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", capless)
    model = family.model(attn_implementation="sdpa")
    assert model.config._attn_implementation == "sdpa"
    dense = model(ids, use_cache=False).logits
    assert (dense - capped(ids, use_cache=False).logits).abs().max() > 0.1, "the cap must matter in this model"
    cache = method.build(model, 1.0)()
    parts = ids.split([8, *[1] * 8, 4], dim=1)
    logits = [model(part, past_key_values=cache, use_cache=True).logits for part in parts]
    torch.testing.assert_close(torch.cat(logits, dim=1), dense, atol=2e-4, rtol=0)


def test_a_full_checkpoint_of_a_family_without_sdpa_loads_on_eager(tmp_path, ids):
    from transformers import AutoModelForCausalLM

    model = BY_NAME["gemma2"].model()
    dynakv_model(model, 0.4)
    expected = generate(model, ids)
    dynakv.save_full(model, tmp_path / "full")
    assert torch.equal(generate(AutoModelForCausalLM.from_pretrained(tmp_path / "full"), ids), expected)


# -- Gemma 3: a rotation for each layer type ---------------------------------------------------------------------


def test_layers_with_a_window_keep_their_native_cache_and_the_others_their_rotation(ids):
    model = BY_NAME["gemma3"].model()
    make_cache = dynakv_model(model, 1.0)
    cache = make_cache()
    model(ids, past_key_values=cache)
    assert cache.geometry.layers == (1, 2)
    assert type(cache.layers[0]) is DynamicSlidingWindowLayer
    assert cache.layers[0].keys.shape[2] == 7
    positions = torch.arange(20)[None]
    cos = cache.history.rope().cos_BTE
    rotary = model.model.rotary_emb
    torch.testing.assert_close(cos, rotary(ids[:, :0].float(), positions, "full_attention")[0])
    assert not torch.allclose(cos, rotary(ids[:, :0].float(), positions, "sliding_attention")[0], atol=0.1)


@torch.no_grad()
@every_method
def test_rows_of_a_length_dependent_rotation_of_one_layer_type_are_kept(method):
    """The kind of rotation, too, is the full-attention layers'."""
    ids = torch.randint(1, 97, (2, 48), generator=torch.Generator().manual_seed(5))
    rope = {
        "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    }
    model = BY_NAME["gemma3"].model(rope_parameters=rope, max_position_embeddings=40)
    assert Rotary.from_model(model).rope_type == "dynamic"
    dense = generate(model, ids)
    cache = method.build(model, 1.0)()
    # The model rotates by the longest text since a short one, and the calibration may have read a longer one than `ids`.
    model(ids[:, :1], use_cache=False)
    assert torch.equal(generate(model, ids, cache), dense)


def test_compressed_layers_that_rotate_differently_are_refused(monkeypatch):
    """No stock family is so; its geometry would name layers of two types."""
    model = BY_NAME["gemma3"].model()
    geometry = dataclasses.replace(geometry_of(model), layers=(0, 1, 2))
    monkeypatch.setattr("lowrank_kv.hf.rotary.geometry_of", lambda _: geometry)
    with pytest.raises(UserError, match=r"rotate differently \(full_attention, sliding_attention\)"):
        Rotary.from_model(model)


@pytest.mark.parametrize("family", ["mistral", "phi3"])
@torch.no_grad()
def test_a_window_as_long_as_the_positions_is_none(family):
    """That of Phi-3.5. The mask has it all the same, beyond the positions, too."""
    model = BY_NAME[family].model(sliding_window=64, max_position_embeddings=64)
    ids = torch.randint(1, 97, (1, 50), generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 30, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    stock = model.generate(ids, **options)
    dynakv.open_gates(dynakv.add_compressors(model, dynakv.DynaKVConfig()))
    found = dynakv.use_dynakv_cache(model).generate(ids, **options)
    assert len(found.past_key_values.compressed_layers()) == len(stock.past_key_values.layers)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(stock.logits))


# -- what is refused ---------------------------------------------------------------------------------------------


def uses(model):
    """What both methods do first, attaching and calibrating."""
    return [
        lambda: dynakv.add_compressors(model, dynakv.DynaKVConfig()),
        lambda: calibration_of(model),
    ]


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_a_model_whose_every_layer_slides_is_refused(family):
    model = BY_NAME[family].model(sliding_window=8)
    for use in uses(model):
        with pytest.raises(UserError, match=r"no layer .* has full attention \(sliding_window=8\).* without a window"):
            use()


def test_a_family_whose_attention_cannot_be_replaced_is_refused():
    config = GPTNeoConfig(
        vocab_size=97, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    )
    model = GPTNeoForCausalLM(config)
    for use in (*uses(model), lambda: prepare(model)):
        with pytest.raises(UserError, match="gpt_neo computes attention in its own modules.*another family"):
            use()
    assert model.config._attn_implementation == "eager"


@torch.no_grad()
def test_gates_of_one_family_do_not_fit_another(tmp_path, ids):
    """A checkpoint names the shape it was trained for; another family of the same shape may not be told apart, and is the
    user's affair, but other layers are."""
    model = BY_NAME["gemma3"].model()
    dynakv_model(model, 0.4)
    spread_gates(model)
    dynakv.save_compressor(model, tmp_path / "compressor")
    with pytest.raises(UserError, match="2 compressed layers of 2 KV heads.* 3 compressed layers"):
        dynakv.attach(BY_NAME["llama"].model(num_hidden_layers=3), tmp_path / "compressor")
