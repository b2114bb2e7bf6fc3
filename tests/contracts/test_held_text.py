"""`generate()` with a cache that holds the beginning of its text, a prefix or an earlier turn: nothing is read twice."""

import copy
import functools

import pytest
import torch
from methods import METHODS, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.generation import CandidateGenerator

from lowrank_kv.hf.prepare import restore
from lowrank_kv.utils.errors import UserError

NAMES = ("dynakv", "dynakv-joint-plan", "joint-mixed", "ojakv-joint", "ojakv-pf")  # each with other layers
PICKED = [method for method in METHODS if method.name in NAMES]
DYNAKV = next(method for method in PICKED if method.name == "dynakv")
every_method = pytest.mark.parametrize("method", PICKED, ids=lambda method: method.name)
HELD, PROMPT, NEW = 40, 52, 12
LOOKUP = {"prompt_lookup_num_tokens": 4}


@pytest.fixture
def whole():
    """A text whose n-grams recur, so that looking them up drafts."""
    return torch.randint(1, 97, (1, 13), generator=torch.Generator().manual_seed(5)).repeat(1, PROMPT // 13)


def generate(model, ids, cache=None, **settings):
    """What is said behind a prompt."""
    settings = {"max_new_tokens": NEW, "do_sample": False, **settings}
    return model.generate(ids, past_key_values=cache, **settings)[0, -NEW:]


def assisted():
    assistant = tiny_model(num_hidden_layers=1)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return {"assistant_model": assistant}


def tokens_of_calls(model) -> list[int]:
    tokens = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return tokens


# -- drafts ------------------------------------------------------------------------------------------------------


@torch.no_grad()
@every_method
def test_behind_a_prefix_drafts_change_nothing(method, whole):
    model = tiny_model()
    dense = generate(model, whole)
    prefix = method.build(model, 1.0)()
    model(whole[:, :HELD], past_key_values=prefix)
    tokens = tokens_of_calls(model)
    for drafts in ({}, LOOKUP, assisted()):
        cache = copy.deepcopy(prefix)
        tokens.clear()
        assert torch.equal(generate(model, whole, cache, **drafts), dense)
        assert cache.get_seq_length() == PROMPT + NEW - 1
        assert PROMPT - HELD <= tokens[0] <= PROMPT - HELD + 4
        assert bool(drafts) == (tokens[0] > PROMPT - HELD)


@torch.no_grad()
@pytest.mark.parametrize("drafts", [LOOKUP, "assisted"], ids=["looked up", "assisted"])
def test_in_a_later_turn_drafts_change_nothing_at_a_compressed_rate(drafts, whole):
    """What DynaKV stores of a token depends on that token alone, so that drafts change nothing at any rate."""
    drafts = assisted() if drafts == "assisted" else drafts
    model = tiny_model()
    dense = generate(model, whole)
    make_cache = DYNAKV.build(model, 0.3)
    said = []
    for settings in ({}, drafts):
        cache, text = make_cache(), whole[:, :HELD]
        for turn in range(3):
            text = torch.cat([text, generate(model, text, cache, **settings)[None], whole[:, turn : turn + 20]], dim=1)
            assert cache.get_seq_length() == text.shape[1] - 21
        said.append(text)
    assert torch.equal(*said)
    assert not torch.equal(generate(model, whole, make_cache()), dense)


@torch.no_grad()
@pytest.mark.parametrize("drafts", [{}, LOOKUP], ids=["none", "looked up"])
def test_only_what_is_new_may_be_given_with_a_mask_of_the_whole(drafts, whole):
    model = tiny_model()
    dense = generate(model, whole)
    cache = DYNAKV.build(model, 1.0)()
    model(whole[:, :HELD], past_key_values=cache)
    mask = torch.ones_like(whole)
    assert torch.equal(generate(model, whole[:, HELD:], cache, attention_mask=mask, **drafts), dense)
    assert cache.get_seq_length() == PROMPT + NEW - 1


@torch.no_grad()
def test_with_padding_the_whole_text_is_given(whole):
    model = tiny_model()
    dense = generate(model, whole)
    cache = DYNAKV.build(model, 1.0)()
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), whole], dim=1)
    mask = (padded > 0).long()
    held = slice(0, HELD + 5)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(padded[:, held], attention_mask=mask[:, held], position_ids=positions[:, held], past_key_values=cache)
    other = copy.deepcopy(cache)
    assert torch.equal(generate(model, padded, cache, attention_mask=mask, **LOOKUP), dense)
    with pytest.raises(UserError, match="needs all of the text as `input_ids`, the 45 tokens that the cache holds"):
        generate(model, padded[:, HELD + 5 :], other, attention_mask=mask, **LOOKUP)
    assert torch.equal(generate(model, padded[:, HELD + 5 :], other, attention_mask=mask), dense)


@torch.no_grad()
def test_embeddings_go_on_behind_a_prefix(whole):
    model = tiny_model()
    dense, embeds = generate(model, whole), model.get_input_embeddings()(whole)
    cache = DYNAKV.build(model, 1.0)()
    model(whole[:, :HELD], past_key_values=cache)
    with pytest.raises(
        UserError, match="`inputs_embeds` take the place of `input_ids` .* leave out the `inputs_embeds`"
    ):
        generate(model, whole, cache, inputs_embeds=embeds, **LOOKUP)
    assert torch.equal(generate(model, None, cache, inputs_embeds=embeds, **LOOKUP), dense)
    assert cache.get_seq_length() == PROMPT + NEW - 1


@torch.no_grad()
def test_a_generate_that_was_cut_short_leaves_nothing_behind(whole, monkeypatch):
    model = tiny_model()
    dense = generate(model, whole)
    cache = DYNAKV.build(model, 1.0)()
    model(whole[:, :HELD], past_key_values=cache)
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "prepare_inputs_for_generation", None)
        with pytest.raises(TypeError):
            generate(model, whole, cache, **LOOKUP)
    for drafts in ({}, LOOKUP):
        assert torch.equal(generate(model, whole, copy.deepcopy(cache), **drafts), dense)


@torch.no_grad()
def test_drafts_that_need_all_of_a_prompt_are_refused(whole, monkeypatch):
    class Reading(CandidateGenerator):
        requires_model_outputs = True

    model = tiny_model()
    cache = DYNAKV.build(model, 1.0)()
    model(whole[:, :HELD], past_key_values=cache)
    monkeypatch.setattr(type(model), "_get_candidate_generator", lambda *args, **kwargs: Reading())
    with pytest.raises(UserError, match="a Reading drafts from what the model computes .* holds 40 of them already"):
        generate(model, whole, cache, **LOOKUP)


@torch.no_grad()
@pytest.mark.parametrize("name", ["prepare_inputs_for_generation", "_get_candidate_generator"])
def test_what_somebody_put_in_the_place_of_a_hook_stays_and_is_refused_where_the_hook_is_needed(name, whole):
    model = tiny_model()
    make_cache = DYNAKV.build(model, 1.0)
    dense = generate(model, whole, make_cache())
    own = functools.partial(getattr(type(model), name), model)
    setattr(model, name, own)
    cache = make_cache()
    model(whole[:, :HELD], past_key_values=cache)
    with pytest.raises(UserError, match=f"`model.{name}` was replaced, so .* the 40 tokens that"):
        generate(model, whole, cache, **LOOKUP)
    assert torch.equal(generate(model, whole, cache), dense)
    assert torch.equal(generate(model, whole, make_cache(), **LOOKUP), dense)
    restore(model)
    assert getattr(model, name) is own


def test_the_hooks_go_with_the_compression_and_take_the_same_arguments(whole):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2, n_positions=96, pad_token_id=0))
    before = set(model.__dict__)
    DYNAKV.build(model, 0.5)
    with pytest.raises(ValueError, match="model_kwargs.* are not used by the model: .*'no_such_argument'"):
        model.generate(whole, no_such_argument=1)
    restore(model)
    assert set(model.__dict__) == before


# -- nothing new -------------------------------------------------------------------------------------------------


@torch.no_grad()
@every_method
def test_a_text_that_the_cache_holds_is_refused(method, whole):
    model = tiny_model()
    dense = generate(model, whole)
    cache = method.build(model, 1.0)()
    model(whole, past_key_values=cache)
    for length in (PROMPT, HELD):
        message = f"a text of {length} tokens, and the cache holds 52 already.*`cache.crop.{length - 53}.` first"
        for drafts in ({}, LOOKUP):
            with pytest.raises(UserError, match=message):
                generate(model, whole[:, :length], cache, **drafts)
    assert cache.get_seq_length() == PROMPT, "nothing has changed"
    cache.crop(-1)
    assert torch.equal(generate(model, whole, cache), dense)


@torch.no_grad()
def test_what_is_new_alone_is_refused_without_a_mask_of_the_whole(whole):
    model = tiny_model()
    cache = DYNAKV.build(model, 1.0)()
    model(whole[:, :HELD], past_key_values=cache)
    with pytest.raises(
        UserError, match="a text of 12 tokens, and the cache holds 40 .* an `attention_mask` as long as"
    ):
        generate(model, whole[:, HELD:], cache)


@torch.no_grad()
@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"inputs_embeds": True}], ids=str)
def test_in_every_mode_one_new_token_is_enough_and_none_is_refused(settings, whole):
    model = tiny_model()
    ids = whole
    if "inputs_embeds" in settings:
        ids, settings = None, {"inputs_embeds": model.get_input_embeddings()(whole)}
    dense = generate(model, ids, **settings)
    cache = DYNAKV.build(model, 1.0)()
    model(whole, past_key_values=cache)
    cache.batch_repeat_interleave(settings.get("num_beams", 1))
    with pytest.raises(UserError, match="a text of 52 tokens, and the cache holds 52 already"):
        generate(model, ids, cache, **settings)
    cache.crop(-1)
    assert torch.equal(generate(model, ids, cache, **settings), dense)


@torch.no_grad()
def test_a_cache_that_is_not_to_be_used_is_refused(whole):
    model = tiny_model()
    dense = generate(model, whole)
    make_cache = DYNAKV.build(model, 1.0)
    with pytest.raises(UserError, match="`use_cache=False` reads the whole text at every token"):
        generate(model, whole, make_cache(), use_cache=False)
    assert torch.equal(generate(model, whole, use_cache=False), dense)
