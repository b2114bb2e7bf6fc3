"""A call that a layer refuses leaves its cache as it was."""

from unittest.mock import Mock

import pytest
import torch
from families import BY_NAME
from methods import METHODS, picked, tiny_model

from lowrank_kv.hf.compile_decoding import compile_decoding
from lowrank_kv.utils.errors import UserError

every_method = pytest.mark.parametrize(
    "method", [m for m in METHODS if m.name in ("dynakv", "ojakv-joint", "ojakv-pf")], ids=lambda m: m.name
)


@every_method
@torch.no_grad()
def test_a_refused_call_leaves_no_rotations(method, monkeypatch):
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    ids = torch.randint(1, 97, (1, 30), generator=torch.Generator().manual_seed(0))
    cache, untouched = make_cache(), make_cache()
    for each in (cache, untouched):
        model(ids[:, :24], past_key_values=each)

    def refuse(*_):
        raise UserError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(cache.layers[0], "append", refuse)
        with pytest.raises(UserError, match="no room"):
            model(ids[:, 24:27], past_key_values=cache, position_ids=torch.tensor([[50, 51, 52]]))
    with pytest.raises(UserError, match="holds 1 sequences, but 2 were passed; call `cache.batch_repeat_interleave.2"):
        model(ids[:, 24:27].repeat(2, 1), past_key_values=cache)
    assert cache.get_seq_length() == 24
    for tokens in (ids[:, 24:25], ids[:, 25:]):
        found, expected = (model(tokens, past_key_values=each).logits for each in (cache, untouched))
        assert torch.equal(found, expected)
    assert cache.nbytes == untouched.nbytes


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@torch.no_grad()
def test_an_empty_cache_takes_any_number_of_sequences(method, monkeypatch):
    """Where its first call was refused, and where all of it was cropped."""
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    ids = torch.randint(1, 97, (3, 40), generator=torch.Generator().manual_seed(0))

    def refuse(*_):
        raise UserError("no room")

    refused, cropped, fresh = make_cache(), make_cache(), make_cache()
    with monkeypatch.context() as patched:
        patched.setattr(refused.layers[1], "append", refuse)
        with pytest.raises(UserError, match="no room"):
            model(ids[:2], past_key_values=refused)
    refused.crop(0)
    padding = torch.ones(2, 40, dtype=torch.int64).index_fill(1, torch.arange(5), 0)
    model(ids[:2], attention_mask=padding, past_key_values=cropped)
    cropped.crop(-40)
    for step in (ids[:, :39], ids[:, 39:]):
        expected = model(step, past_key_values=fresh).logits
        for cache in (refused, cropped):
            assert torch.equal(model(step, past_key_values=cache).logits, expected)


@every_method
@torch.no_grad()
def test_what_names_no_sequences_and_no_tokens_is_refused_and_changes_nothing(method):
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    cache, untouched = make_cache(), make_cache()
    for each in (cache, untouched):
        model(ids[:, :30], past_key_values=each)
    none = torch.empty(0, dtype=torch.int64)
    for indices in (1, [[0, 1]], torch.tensor([0.7]), none, torch.tensor([False, False]), slice(2, 5)):
        with pytest.raises(UserError, match="`indices` is .*: give"):
            cache.batch_select_indices(indices)
    for repeats, message in ((0, "at least 1; got 0"), (-1, "at least 1"), (1.5, "a whole number; got 1.5")):
        with pytest.raises(UserError, match=f"`repeats` must be {message}"):
            cache.batch_repeat_interleave(repeats)
    for target in (cache, cache.compressed_layers()[0]):
        with pytest.raises(UserError, match="`tokens_to_remove` must be a whole number; got -1.5"):
            target.crop(-1.5)
    for length, message in (("40", "a whole number"), (30, "more than the 30 tokens"), (-1, "more than the 30 tokens")):
        with pytest.raises(UserError, match=f"`length` must be {message}"):
            cache.expect_prompt(length)
    for step in (ids[:, 30:31], ids[:, 31:]):
        found, expected = (model(step, past_key_values=each).logits for each in (cache, untouched))
        assert torch.equal(found, expected)
    cache.batch_select_indices(slice(1, 2))
    untouched.batch_select_indices([1])
    found, expected = (model(ids[1:, :1], past_key_values=each).logits for each in (cache, untouched))
    assert torch.equal(found, expected)


@every_method
@pytest.mark.parametrize("is_known_by_class", [True, False])
@torch.no_grad()
def test_a_rotary_module_of_another_name_is_found_or_its_model_refused(method, is_known_by_class):
    class Turning(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.forward = inner.forward

    model = tiny_model()
    ids = torch.randint(1, 97, (1, 30), generator=torch.Generator().manual_seed(0))
    dense = model(ids, use_cache=False).logits
    rotary = model.model._modules.pop("rotary_emb")
    model.model._modules["turn"] = rotary if is_known_by_class else Turning(rotary)
    # The model calls it by its old name.
    type(model.model).rotary_emb = property(lambda self: self._modules.get("turn", self._modules.get("rotary_emb")))
    try:
        if not is_known_by_class:
            with pytest.raises(UserError, match="rotates keys by a module that was not found"):
                model(ids, past_key_values=method.build(model, 1.0)())
            return
        cache = method.build(model, 1.0)()
        parts = [model(part, past_key_values=cache).logits for part in ids.split([24, 1, 5], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), dense, atol=2e-4, rtol=0)
    finally:
        del type(model.model).rotary_emb


def positions(start: int, end: int, rows: int) -> torch.Tensor:
    """As `generate()` gives them: for each sequence."""
    return torch.arange(start, end).expand(rows, -1)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@torch.no_grad()
def test_a_cropped_text_of_two_leaves_no_rotations_of_two(method, rows):
    """Behind it, a chunk of a text is read as dense keys that are rotated as the cache remembers."""
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    ids = torch.randint(1, 97, (3, 60), generator=torch.Generator().manual_seed(0))
    cropped, fresh = make_cache(), make_cache()
    model(ids[:2, :40], position_ids=positions(0, 40, 2), past_key_values=cropped)
    cropped.crop(-40)
    for start, end in ((0, 36), (36, 58), (58, 59)):
        given = {"input_ids": ids[:rows, start:end], "position_ids": positions(start, end, rows)}
        found, expected = (model(**given, past_key_values=cache).logits for cache in (cropped, fresh))
        assert torch.equal(found, expected)
    assert cropped.nbytes == fresh.nbytes


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
@torch.no_grad()
def test_a_cropped_text_leaves_no_number_of_sequences_in_native_layers(family):
    model = BY_NAME[family].model()
    make_cache = picked("dynakv")[0].build(model, 0.5)
    ids = torch.randint(1, 97, (3, 30), generator=torch.Generator().manual_seed(0))
    cropped, fresh = make_cache(), make_cache()
    model(ids[:2], past_key_values=cropped)
    cropped.crop(-30)
    for step in (ids[:, :29], ids[:, 29:]):
        found, expected = (model(step, past_key_values=cache).logits for cache in (cropped, fresh))
        assert torch.equal(found, expected)


@torch.no_grad()
def test_a_compiled_step_refuses_a_cache_whose_call_was_cut(monkeypatch):
    """Also where keys are stored rotated, so that no rotations are remembered that would tell."""
    model = tiny_model()
    cache = picked("ojakv-pf")[0].build(model, 0.5)()
    ids = torch.randint(1, 97, (1, 30), generator=torch.Generator().manual_seed(0))
    model(ids[:, :29], past_key_values=cache)
    with monkeypatch.context() as patched:
        patched.setattr(cache.layers[1], "append", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 29:], past_key_values=cache)
    compile_decoding(model)
    with pytest.raises(
        UserError, match=r"layers hold different numbers of tokens, .*`cache\.crop\(0\)` makes them equal"
    ):
        model(ids[:, 29:], past_key_values=cache)
    cache.crop(0)
    cache.check_even()
