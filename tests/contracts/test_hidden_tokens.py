"""A token that its own call hides from every query is padding to a cache that keeps a window: it is not stored, and a later
call that would attend to it is refused."""

import pytest
import torch
from methods import METHODS, tiny_model
from transformers import DynamicCache

from lowrank_kv.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("without_gradients")

PROMPT = 40
NAMES = ("ojakv-joint", "ojakv-pf", "adaptive-mixed", "joint-mixed", "dynakv-plan")
every_method = pytest.mark.parametrize(
    "method", [m for m in METHODS if m.name in NAMES], ids=lambda method: method.name
)
STORES_ALL = [method for method in METHODS if method.name == "dynakv"]


@pytest.fixture
def ids():
    return torch.randint(1, 97, (2, PROMPT), generator=torch.Generator().manual_seed(5))


def hiding(*places: int, tokens: int = PROMPT) -> torch.Tensor:
    """A mask of two sequences that hides these tokens of the second."""
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[1, list(places)] = 0
    return mask


def place_of(tokens: int) -> torch.Tensor:
    return torch.arange(PROMPT, PROMPT + tokens).expand(2, -1)


LATER_MASKS = {
    "ones": (lambda tokens: hiding(tokens=PROMPT + tokens), 20, "is left out, or all ones, and so shows"),
    "none": (lambda tokens: None, 20, "is left out, or all ones, and so shows"),
    "one shown": (lambda tokens: hiding(20, 21, 23, tokens=PROMPT + tokens), 22, "shows"),
    "of its own": (lambda tokens: hiding(20, 21, tokens=PROMPT + tokens)[:, None, None].bool(), 22, "shows"),
}


@every_method
@pytest.mark.parametrize("later", LATER_MASKS.values(), ids=LATER_MASKS)
def test_a_hidden_token_that_is_shown_later_is_refused(method, later, ids):
    model, (mask_of, position, shows) = tiny_model(), later
    make_cache = method.build(model, 0.5)
    cache, untouched = make_cache(), make_cache()
    for each in (cache, untouched):
        model(ids, attention_mask=hiding(20, 21, 22, 23), past_key_values=each)
    step = {"input_ids": ids[:, :1], "position_ids": place_of(1)}
    with pytest.raises(UserError, match=f"`attention_mask` {shows} the token at position {position} of sequence 1"):
        model(**step, attention_mask=mask_of(1), past_key_values=cache)
    assert cache.get_seq_length() == PROMPT
    right = hiding(20, 21, 22, 23, tokens=PROMPT + 1)
    found, expected = (model(**step, attention_mask=right, past_key_values=each).logits for each in (cache, untouched))
    assert torch.equal(found, expected)


@every_method
def test_several_tokens_at_once_are_refused_as_one_is(method, ids):
    model = tiny_model()
    cache = method.build(model, 0.5)()
    model(ids, attention_mask=hiding(0, 1), past_key_values=cache)
    for tokens in (2, 30):
        more = {"input_ids": ids[:, :tokens], "position_ids": place_of(tokens), "past_key_values": cache}
        with pytest.raises(UserError, match="shows the token at position 0 of sequence 1"):
            model(**more, attention_mask=hiding(1, tokens=PROMPT + tokens))
        # Its last token alone looks there.
        mask = hiding(0, 1, tokens=PROMPT + tokens)[:, None, None].bool().repeat(1, 1, tokens, 1)
        mask[1, 0, -1, 1] = True
        with pytest.raises(UserError, match="shows the token at position 1 of sequence 1"):
            model(**more, attention_mask=mask)


@pytest.mark.parametrize("method", STORES_ALL, ids=lambda method: method.name)
def test_a_cache_that_stores_every_token_shows_it_as_the_dense_model_does(method, ids):
    model = tiny_model()
    make_cache = method.build(model, 1.0)

    def logits(cache):
        model(ids, attention_mask=hiding(20, 21), past_key_values=cache)
        return model(ids[:, :1], position_ids=place_of(1), past_key_values=cache).logits

    found = logits(make_cache())
    model = tiny_model()
    torch.testing.assert_close(found, logits(DynamicCache(config=model.config)), atol=1e-4, rtol=1e-4)


@every_method
def test_hidden_tokens_that_were_cropped_are_forgotten(method, ids):
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    cache = make_cache()
    model(ids, attention_mask=hiding(PROMPT - 3, PROMPT - 2), past_key_values=cache)
    with pytest.raises(UserError, match=f"position {PROMPT - 3} of sequence 1"):
        model(ids[:, :1], past_key_values=cache)
    cache.crop(-2)
    with pytest.raises(UserError, match=f"position {PROMPT - 3} of sequence 1"):
        model(ids[:, :1], past_key_values=cache)
    cache.crop(-1)
    assert model(ids[:, :1], past_key_values=cache).logits.isfinite().all()
    assert cache.get_seq_length() == PROMPT - 2


@every_method
def test_a_later_turn_of_generate_needs_the_mask_of_the_first(method, ids):
    model, settings = tiny_model(), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    make_cache = method.build(model, 0.5)
    mask, turn = hiding(*range(9)), ids[:, :5]
    padded = ids * mask
    cache = make_cache()
    first = model.generate(padded, attention_mask=mask, past_key_values=cache, **settings)
    text = torch.cat([first, turn], dim=1)
    with pytest.raises(UserError, match="`attention_mask` shows the token at position 0 of sequence 1"):
        model.generate(text, attention_mask=torch.ones_like(text), past_key_values=cache, **settings)
    extended = torch.cat([mask, torch.ones_like(text[:, PROMPT:])], dim=1)
    second = model.generate(text, attention_mask=extended, past_key_values=cache, **settings)
    alone = make_cache()
    for text_alone in (ids[1:, 9:], second[1:, 9 : text.shape[1]]):
        said = model.generate(text_alone, past_key_values=alone, **settings)
    assert torch.equal(second[1, 9:], said[0])
