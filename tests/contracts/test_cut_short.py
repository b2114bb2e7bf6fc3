"""A call that was cut short, by the stop button, by a refusal: the cache is made whole again, or says that it is not."""

import copy
from unittest.mock import Mock

import pytest
import torch
from families import BY_NAME
from methods import METHODS, calibration_of, dynakv_model, tiny_model

import lowrank_kv
from lowrank_kv.hf import attention
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig, make_plan

every_method = pytest.mark.parametrize(
    "method", [m for m in METHODS if m.name in ("dynakv", "ojakv-joint", "static-pca-joint")], ids=lambda m: m.name
)


@pytest.fixture
def ids():
    return torch.randint(1, 97, (1, 43), generator=torch.Generator().manual_seed(0))


def interrupted(model, ids, cache, layer=1):
    """A call that ends before the layer's MLP: layers up to this one have stored its tokens."""

    def stop(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[layer].mlp.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(ids, past_key_values=cache)
    hook.remove()


def begun(method, ids):
    """A model, and a cache of it that has read 40 tokens."""
    model = tiny_model()
    cache = method.build(model, 1.0)()
    model(ids[:, :40], past_key_values=cache)
    return model, cache


def lengths(cache):
    return [layer.get_seq_length() for layer in cache.layers]


@every_method
@torch.no_grad()
def test_crop_makes_a_cache_whole(method, ids):
    model, cache = begun(method, ids)
    untouched = copy.deepcopy(cache)
    interrupted(model, ids[:, 40:41], cache)
    assert lengths(cache) == [41, 41, 40]
    cache.crop(0)
    assert lengths(cache) == [40, 40, 40]
    found, expected = (model(ids[:, 40:], past_key_values=each).logits for each in (cache, untouched))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@torch.no_grad()
def test_tokens_behind_a_cut_are_refused_until_it_is_mended(method, ids):
    model, cache = begun(method, ids)
    interrupted(model, ids[:, 40:41], cache)
    with pytest.raises(UserError, match=r"`cache.crop\(0\)` makes them equal"):
        model(ids[:, 40:], past_key_values=cache)
    cache.crop(0)
    stock = tiny_model()(ids).logits[:, 40:]
    assert torch.allclose(model(ids[:, 40:], past_key_values=cache).logits, stock, atol=1e-4)


@every_method
@torch.no_grad()
def test_a_first_call_that_was_cut_short_leaves_an_empty_cache(method, ids):
    model = tiny_model()
    cache = method.build(model, 1.0)()
    interrupted(model, ids[:, :40], cache)
    cache.crop(0)
    assert lengths(cache) == [0, 0, 0]
    stock = tiny_model()(ids).logits
    assert torch.allclose(model(ids, past_key_values=cache).logits, stock, atol=1e-4)


@pytest.mark.parametrize("is_cropped", [True, False])
@torch.no_grad()
def test_a_prompt_that_was_not_attended_answers_for_no_other_text(is_cropped, ids, monkeypatch):
    """A layer keeps a prompt's states until its attention has run."""
    model = tiny_model()
    cache = dynakv_model(model, 1.0, prefill="reconstructed")()
    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[2], "is_decoding", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :20], past_key_values=cache)
    if is_cropped:
        cache.crop(0)
        cache.crop(-20)
    start = cache.get_seq_length()
    new = ids[:, 20:40]
    stock = tiny_model()(torch.cat([ids[:, :start], new], dim=1)).logits[:, start:]
    assert torch.allclose(model(new, past_key_values=cache).logits, stock, atol=1e-4)


@every_method
@torch.no_grad()
def test_weights_are_refused_before_anything_is_stored(method, ids):
    model, cache = begun(method, ids)
    with pytest.raises(UserError, match="`output_attentions=True` asks for the weights"):
        model.generate(ids, past_key_values=cache, output_attentions=True, return_dict_in_generate=True)
    assert lengths(cache) == [40, 40, 40]
    stock = tiny_model().generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False), stock)


@torch.no_grad()
def test_no_layer_forgets_where_one_cannot():
    types = ["full_attention", "sliding_attention", "full_attention"]
    model = BY_NAME["gemma3"].model(layer_types=types)
    lowrank_kv.compress(model, "ojakv-joint", bases=calibration_of(model), rate=1.0)
    ids = torch.randint(1, 97, (2, 40))
    cache = model(ids).past_key_values
    with pytest.raises(UserError, match="a layer with a sliding window of 8 has forgotten those before it"):
        cache.crop(-3)
    assert lengths(cache) == [40, 40, 40]
    assert cache.history.length == 40


@torch.no_grad()
def test_no_layer_forgets_where_one_has_recorded_too_little():
    """A window that is told to record keeps what it has and what comes then, and a crop takes it back to its own length."""
    model = BY_NAME["gemma3"].model(layer_types=["full_attention", "sliding_attention", "full_attention"])
    stock = copy.deepcopy(model)
    lowrank_kv.compress(model, "ojakv-joint", bases=calibration_of(model), rate=1.0)
    ids = torch.randint(1, 97, (2, 40))
    cache = model(ids[:, :30]).past_key_values
    cache.activate_past_recording()
    model(ids[:, 30:34], past_key_values=cache)
    cache.crop(-3)
    with pytest.raises(UserError, match="a layer with a sliding window of 8 has forgotten those before it"):
        cache.crop(-5)
    assert lengths(cache) == [31, 31, 31]
    found = model(ids[:, 31:], past_key_values=cache).logits
    torch.testing.assert_close(found, stock(ids).logits[:, 31:], atol=5e-4, rtol=0)


@every_method
@torch.no_grad()
def test_sequences_may_be_counted_from_the_end(method):
    model = tiny_model()
    make_cache = method.build(model, 1.0)
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    logits = []
    for rows in ([-1, 1], [1, 1]):
        cache = make_cache()
        model(ids, past_key_values=cache)
        cache.batch_select_indices(torch.tensor(rows))
        logits.append([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(3)][-1])
    assert torch.equal(*logits)
    with pytest.raises(UserError, match=r"`indices` is \[0, 2\], but the cache holds 2 sequences"):
        cache.batch_select_indices(torch.tensor([0, 2]))


@every_method
@pytest.mark.parametrize("indices", [[False, True], [True, False, True, True], [[True], [False], [True]]])
@torch.no_grad()
def test_a_boolean_index_says_of_every_sequence_whether_it_stays(method, indices):
    model = tiny_model()
    cache = method.build(model, 1.0)()
    ids = torch.randint(1, 97, (3, 41), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :15] = 0  # so that each sequence has rotations of its own
    model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
    with pytest.raises(UserError, match="but the cache holds 3 sequences: .* give one of length 3"):
        cache.batch_select_indices(torch.tensor(indices))
    cache.batch_select_indices(torch.tensor([False, True, True]))
    stock = tiny_model()(ids[1:]).logits[:, 40:]
    found = model(ids[1:, 40:], attention_mask=mask[1:], past_key_values=cache).logits
    assert torch.allclose(found, stock, atol=1e-4)


@pytest.mark.parametrize("indices", [torch.tensor([False, True]), torch.tensor([0, 3])])
@torch.no_grad()
def test_a_wrong_index_moves_no_native_layer(indices):
    model = BY_NAME["gemma3"].model(layer_types=["sliding_attention", "full_attention", "full_attention"])
    lowrank_kv.compress(model, "ojakv-joint", bases=calibration_of(model), rate=1.0)
    cache = model(torch.randint(1, 97, (3, 40))).past_key_values
    for move in (cache.batch_select_indices, cache.reorder_cache):
        with pytest.raises(UserError, match="but the cache holds 3 sequences"):
            move(indices)
    assert lengths(cache) == [40, 40, 40]
    assert cache.layers[0].keys.shape[0] == 3


@every_method
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@torch.no_grad()
def test_beams_that_were_cut_short_leave_an_empty_cache(method, error, ids, monkeypatch):
    """Some layers would hold other sequences than the others."""
    model = tiny_model()
    cache = method.build(model, 1.0)()
    ids = torch.cat([ids, ids.flip(1)])
    model(ids[:, :40], past_key_values=cache)
    monkeypatch.setattr(cache.layers[1], "select", Mock(side_effect=error))
    with pytest.raises(error):
        cache.reorder_cache(torch.tensor([1, 0]))
    assert lengths(cache) == [0, 0, 0]
    assert torch.allclose(model(ids, past_key_values=cache).logits, tiny_model()(ids).logits, atol=1e-4)


@torch.no_grad()
def test_a_cache_may_be_given_by_its_place(ids):
    model = tiny_model()
    make_cache = METHODS[0].build(model, 1.0)
    by_name, by_place = make_cache(), make_cache()
    expected = model.model(ids, past_key_values=by_name)[0]
    assert torch.equal(model.model(ids, None, None, by_place)[0], expected)
    assert by_place.get_seq_length() == 43


def test_a_model_that_would_assist_itself_is_refused_and_stays_whole(ids):
    model = tiny_model()
    lowrank_kv.compress(model, "ojakv-joint", bases=calibration_of(model), rate=1.0)
    with pytest.raises(UserError, match="`assistant_early_exit=1` drafts with the first layers"):
        model.generate(ids, assistant_early_exit=1, max_new_tokens=4, do_sample=False)
    assert model.config.num_hidden_layers == 3
    model.generate(ids, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize(
    ("kinds", "layer"),
    [
        (("sliding", "full", "full"), 0),
        (("full", "full", "sliding"), 1),
        (("full", "sliding", "full"), 0),
        (("full", "sliding", "full"), 1),
    ],
)
@torch.no_grad()
def test_a_torn_cache_is_refused_whichever_layers_have_a_window(kinds, layer, ids):
    """Layers with a window of their own keep stock caches, before the compressed ones and behind them."""
    model = BY_NAME["gemma3"].model(layer_types=[f"{kind}_attention" for kind in kinds])
    with torch.enable_grad():
        plan = make_plan(calibration_of(model), OjaKVConfig.preset("static-joint-pf", rate=1.0))
    cache = OjaKVCache(model, plan)
    model(ids[:, :40], past_key_values=cache)
    interrupted(model, ids[:, 40:41], cache, layer)
    with pytest.raises(UserError, match=r"as after a call that was cut short: `cache.crop\(0\)` makes them equal"):
        model(ids[:, 40:41], past_key_values=cache)


def held(cache):
    """What layers hold of a running call."""
    of_layers = ((layer._pending_call, *vars(layer.stored).values()) for layer in cache.compressed_layers())
    return [each for found in of_layers for each in found if each is not None]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@torch.no_grad()
def test_nothing_of_a_call_outlives_it(method, ids, monkeypatch):
    """A whole prompt's keys and values would stay beside the coefficients of a call that lacked memory for its attention."""
    model = tiny_model()
    cache = method.build(model, 0.5)()
    model(ids[:, :20], past_key_values=cache)
    assert not held(cache)
    with monkeypatch.context() as patch:
        patch.setattr(cache.compressed_layers()[1], "attend_cached", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            model(ids[:, 20:30], past_key_values=cache)
    assert not held(cache), "attention that fails"
    cache.crop(0)
    for layer in cache.compressed_layers():
        assert "_new" not in vars(layer)
    for end in ("begin", "reset"):
        with monkeypatch.context() as patch:  # between what a layer stores and its attention
            patch.setattr(attention, "refuse", Mock(side_effect=[None, KeyboardInterrupt]))
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, 20:30], past_key_values=cache)
        assert held(cache)
        cache.crop(0)
        if end == "begin":
            model(ids[:, 20:21], past_key_values=cache)
            cache.crop(0)
        else:
            cache.reset()
        assert not held(cache)
