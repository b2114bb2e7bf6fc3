"""Families most of whose layers keep one state for all tokens: drafts, crops, moves of sequences, and calls cut short."""

import copy
from unittest.mock import Mock

import pytest
import torch
from families import BY_NAME, RECURRENT
from methods import METHODS

from lowrank_kv.hf import compile_decoding
from lowrank_kv.hf.prepare import restore
from lowrank_kv.utils.errors import UserError

every_family = pytest.mark.parametrize("family", RECURRENT, ids=lambda family: family.name)
DYNAKV = next(method for method in METHODS if method.name == "dynakv")


@pytest.fixture
def ids():
    return torch.randint(1, 97, (3, 44), generator=torch.Generator().manual_seed(0))


def begun(family, ids):
    """A model, and a cache of it that has read 40 tokens."""
    model = family.model()
    cache = DYNAKV.build(model, 1.0)()
    model(ids[:, :40], past_key_values=cache)
    return model, cache


def stock_logits(family, ids, past=40):
    return family.model()(ids).logits[:, past:]


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def interrupted(model, ids, cache, module):
    """A call that ends before the module."""

    def stop(*_):
        raise KeyboardInterrupt

    hook = module.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(ids, past_key_values=cache)
    hook.remove()


@pytest.mark.parametrize("removed", [0, 1, 3])
@torch.no_grad()
def test_recorded_tokens_of_convolutions_may_be_taken_back(ids, removed):
    model, cache = begun(BY_NAME["lfm2"], ids)
    cache.activate_past_recording()
    model(ids[:, 40:43].flip(1) if removed == 3 else ids[:, 40:43], past_key_values=cache)
    cache.crop(-removed)
    rest = ids[:, 43 - removed :]
    assert_close(model(rest, past_key_values=cache).logits, stock_logits(BY_NAME["lfm2"], ids, 43 - removed))


@pytest.mark.parametrize(
    ("name", "because"),
    [("lfm2", "a convolution layer has forgotten"), ("granitemoehybrid", "cannot give tokens back")],
)
@torch.no_grad()
def test_no_layer_forgets_where_a_recurrent_one_cannot(name, because, ids):
    model, cache = begun(BY_NAME[name], ids)
    with pytest.raises(UserError, match=because):
        cache.crop(-3)
    cache.crop(0)
    assert_close(model(ids[:, 40:], past_key_values=cache).logits, stock_logits(BY_NAME[name], ids))


@torch.no_grad()
def test_more_than_was_recorded_is_not_taken_back(ids):
    model, cache = begun(BY_NAME["lfm2"], ids)
    cache.activate_past_recording()
    model(ids[:, 40:42], past_key_values=cache)
    with pytest.raises(UserError, match="a convolution layer has forgotten"):
        cache.crop(-3)
    assert cache.get_seq_length() == 42


@every_family
@torch.no_grad()
def test_all_tokens_may_be_taken_back(family, ids):
    model, cache = begun(family, ids)
    cache.crop(-40)
    other = ids[:2].flip(1)  # of another number of sequences
    cache.reset()
    assert_close(model(other, past_key_values=cache).logits, stock_logits(family, other, 0))
    cache.crop(-44)
    assert_close(model(other, past_key_values=cache).logits, stock_logits(family, other, 0))


@pytest.mark.parametrize("reached", ["attention", "the last layer"])
@every_family
@torch.no_grad()
def test_tokens_behind_a_cut_are_refused(family, reached, ids):
    """A recurrent layer that has read them cannot give them back, and counts none."""
    model, cache = begun(family, ids)
    layers = model.model.layers
    interrupted(model, ids[:, 40:41], cache, layers[1].self_attn if reached == "attention" else layers[2])
    for again in (lambda: model(ids[:, 40:], past_key_values=cache), lambda: cache.crop(0)):
        with pytest.raises(UserError, match="cut short after recurrent layers had read its tokens"):
            again()
    cache.reset()
    assert_close(model(ids, past_key_values=cache).logits, stock_logits(family, ids, 0))


@torch.no_grad()
def test_tokens_behind_a_cut_in_a_graph_are_refused(ids, monkeypatch):
    model, cache = begun(BY_NAME["lfm2"], ids)
    monkeypatch.setattr(compile_decoding, "_compiled", lambda call: Mock(side_effect=KeyboardInterrupt))
    compile_decoding.compile_decoding(model)
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, 40:41], past_key_values=cache)
    with pytest.raises(UserError, match="cut short after recurrent layers had read its tokens"):
        model(ids[:, 40:41], past_key_values=cache)


@every_family
@torch.no_grad()
def test_a_cut_before_any_layer_ran_is_none(family, ids):
    model, cache = begun(family, ids)
    interrupted(model, ids[:, 40:41], cache, model.model.layers[0])
    assert_close(model(ids[:, 40:], past_key_values=cache).logits, stock_logits(family, ids))


@every_family
@torch.no_grad()
def test_a_first_call_that_was_cut_short_leaves_an_empty_cache(family, ids):
    model = family.model()
    cache = DYNAKV.build(model, 1.0)()
    interrupted(model, ids[:, :40], cache, model.model.layers[2])
    with pytest.raises(UserError, match="read the text again after `cache.reset"):
        model(ids, past_key_values=cache)
    cache.crop(-40)
    assert_close(model(ids, past_key_values=cache).logits, stock_logits(family, ids, 0))


@every_family
@torch.no_grad()
def test_sequences_move_in_all_layers(family, ids):
    model, cache = begun(family, ids)
    twice = copy.deepcopy(cache)
    cache.batch_select_indices(torch.tensor([False, True, True]))
    found = model(ids[1:, 40:], past_key_values=cache).logits
    assert_close(found, stock_logits(family, ids[1:]))
    twice.batch_repeat_interleave(2)
    found = model(ids[:, 40:].repeat_interleave(2, dim=0), past_key_values=twice).logits
    assert_close(found, stock_logits(family, ids.repeat_interleave(2, dim=0)))


@torch.no_grad()
def test_a_restored_model_keeps_no_hooks():
    model = BY_NAME["lfm2"].model()
    DYNAKV.build(model, 1.0)
    assert model.model._forward_hooks
    restore(model)
    assert not model.model._forward_hooks
    assert not model.model._forward_pre_hooks
