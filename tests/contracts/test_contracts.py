"""What every method must do, on a tiny model: the same contracts over all rows of `methods.METHODS`."""

import copy

import pytest
import torch
from methods import METHODS, tiny_model
from tensors_held import found_tensors

from lowrank_kv.utils.errors import UserError

TOLERANCE = {"atol": 1e-4, "rtol": 0}
pytestmark = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


@pytest.fixture
def ids():
    return torch.randint(1, 97, (3, 24), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def decode(model, ids, cache, prompt: int):
    """Logits of a prompt and then one token at a time."""
    steps = [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]
    return torch.cat([model(step, past_key_values=cache, use_cache=True).logits for step in steps], dim=1)


@torch.no_grad()
def test_full_rank_equals_the_dense_model(method, ids):
    model = tiny_model()
    dense = model(ids, use_cache=False).logits
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    make_cache = method.build(model, 1.0)
    torch.testing.assert_close(model(ids, past_key_values=make_cache(), use_cache=True).logits, dense, **TOLERANCE)
    torch.testing.assert_close(decode(model, ids, make_cache(), 7), dense, **TOLERANCE)
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, past_key_values=make_cache()
    )
    assert torch.equal(generated, tokens)


@torch.no_grad()
def test_truncation_changes_the_output_and_saves_bytes(method):
    # Long enough to pay for what a moving basis costs its sequence.
    ids = torch.randint(1, 97, (1, 200), generator=torch.Generator().manual_seed(5))
    model = tiny_model()
    dense = model(ids, use_cache=False).logits
    cache = method.build(model, 0.4)()
    truncated = decode(model, ids, cache, 199)
    assert (truncated[:, 199:] - dense[:, 199:]).abs().max() > 1e-2
    assert cache.rate < 0.8


def rate_that_repeats(method) -> float:
    """A rate at which reading a text in pieces gives what reading it at once does."""
    return 1.0 if method.follows_text else 0.4


@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, 9, 23])
def test_prefill_and_decode_equal_one_pass(method, ids, prompt):
    model = tiny_model()
    make_cache = method.build(model, rate_that_repeats(method))
    whole = model(ids, past_key_values=make_cache(), use_cache=True).logits
    torch.testing.assert_close(decode(model, ids, make_cache(), prompt), whole, **TOLERANCE)


@torch.no_grad()
def test_chunked_prefill_equals_one_pass(method):
    ids = torch.randint(1, 97, (1, 120), generator=torch.Generator().manual_seed(5))
    model = tiny_model()
    make_cache = method.build(model, rate_that_repeats(method))
    whole = model(ids, past_key_values=make_cache(), use_cache=True).logits
    cache = make_cache()
    # 40 tokens rebuild the layer, 5 attend in the compressed form.
    chunks = [model(chunk, past_key_values=cache, use_cache=True).logits for chunk in ids.split([70, 40, 5, 5], dim=1)]
    torch.testing.assert_close(torch.cat(chunks, dim=1), whole, **TOLERANCE)


def test_decoding_goes_on_outside_inference_mode(method):
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(5))
    model = tiny_model()
    make_cache = method.build(model, 0.5)

    def read(mode):
        cache = make_cache()
        with mode():
            model(ids, past_key_values=cache, use_cache=True)
        with torch.no_grad():
            return [model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(12)]

    assert torch.equal(torch.cat(read(torch.inference_mode)), torch.cat(read(torch.no_grad)))


def left_padded(ids, lengths):
    """The last so many ids of each row behind padding, and the mask."""
    mask = (torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


@torch.no_grad()
@pytest.mark.parametrize("prompt", [9, 23])
def test_left_padding_at_full_rank_equals_the_dense_model(method, ids, prompt):
    model = tiny_model()
    padded, mask = left_padded(ids, [24, 17, 5])
    dense = model(padded, attention_mask=mask, use_cache=False).logits
    cache, seen, logits = method.build(model, 1.0)(), 0, []
    for part in (padded[:, :prompt], *padded[:, prompt:].split(1, dim=1)):
        seen += part.shape[1]
        logits.append(model(part, attention_mask=mask[:, :seen], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(logits, dim=1)[mask.bool()], dense[mask.bool()], **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("rate", [0.4, 1.0])
def test_left_padding_changes_nothing(method, ids, rate):
    model = tiny_model()
    make_cache = method.build(model, rate)
    lengths = [24, 17, 5]
    padded, mask = left_padded(ids, lengths)
    batch = model.generate(
        padded, attention_mask=mask, max_new_tokens=10, do_sample=False, past_key_values=make_cache(), pad_token_id=0
    )
    for row, length in enumerate(lengths):
        alone = model.generate(
            ids[row : row + 1, 24 - length :],
            attention_mask=torch.ones(1, length, dtype=torch.long),
            max_new_tokens=10,
            do_sample=False,
            past_key_values=make_cache(),
        )
        assert torch.equal(batch[row, 24:], alone[0, length:])


@torch.no_grad()
def test_beams_at_full_rank_equal_the_dense_model(method, ids):
    model, uncompressed = tiny_model(), tiny_model()
    make_cache = method.build(model, 1.0)
    beams = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for rows, mask in ((ids, torch.ones_like(ids)), left_padded(ids, [24, 17, 5])):
        dense = uncompressed.generate(rows, attention_mask=mask, **beams)
        assert torch.equal(model.generate(rows, attention_mask=mask, past_key_values=make_cache(), **beams), dense)


@torch.no_grad()
def test_reorder_repeat_and_select_follow_the_sequences(method, ids):
    model = tiny_model()
    make_cache = method.build(model, 0.4)
    cache = make_cache()
    model(ids[:, :20], past_key_values=cache, use_cache=True)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 1, 5]))
    order = torch.tensor([2, 2, 0])
    after = model(ids[order, 20:21], past_key_values=cache, use_cache=True).logits
    fresh = make_cache()
    model(ids[order, :20], past_key_values=fresh, use_cache=True)
    expected = model(ids[order, 20:21], past_key_values=fresh, use_cache=True).logits
    torch.testing.assert_close(after, expected, **TOLERANCE)


@torch.no_grad()
def test_crop_forgets_the_last_tokens(method, ids):
    model = tiny_model()
    make_cache = method.build(model, rate_that_repeats(method))
    whole = model(ids, past_key_values=make_cache(), use_cache=True).logits
    cache = make_cache()
    model(torch.cat([ids[:, :12], ids[:, :6]], dim=1), past_key_values=cache, use_cache=True)
    cache.crop(-6)
    assert cache.get_seq_length() == 12
    rest = model(ids[:, 12:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(rest, whole[:, 12:], **TOLERANCE)


@torch.no_grad()
def test_a_copy_is_independent(method, ids):
    model = tiny_model()
    make_cache = method.build(model, rate_that_repeats(method))
    cache = make_cache()
    model(ids[:, :12], past_key_values=cache, use_cache=True)
    twin = copy.deepcopy(cache)
    model(ids[:, 12:], past_key_values=twin, use_cache=True)
    assert (cache.get_seq_length(), twin.get_seq_length()) == (12, 24)
    whole = model(ids, past_key_values=make_cache(), use_cache=True).logits
    rest = model(ids[:, 12:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(rest, whole[:, 12:], **TOLERANCE)


@torch.no_grad()
def test_reported_bytes_are_those_of_the_tensors_held(method, ids):
    model = tiny_model()
    cache = method.build(model, 0.4)()
    decode(model, ids, cache, 9)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for _, tensor in cache.tensors_by_kind()
    }
    assert cache.nbytes == sum(storages.values())
    assert cache.full_nbytes == 3 * 24 * 3 * 2 * 32 * 4
    assert cache.rate == cache.nbytes / cache.full_nbytes
    held = found_tensors(cache)
    assert held <= storages.keys(), "the cache holds tensors it does not report"


@torch.no_grad()
def test_a_mask_of_ones_own_hides_what_a_plain_one_hides(method):
    """transformers passes a four-dimensional mask through; one that is added to scores says the same with floats."""
    ids = torch.randint(1, 97, (1, 40), generator=torch.Generator().manual_seed(5))
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    plain = torch.ones(1, 40, dtype=torch.long)
    plain[0, :8] = 0
    shown = plain[:, None, None].bool()
    logits = []
    for mask in (plain, shown, torch.zeros(1, 1, 1, 40).masked_fill(~shown, torch.finfo(torch.float32).min)):
        cache = make_cache()
        model(ids[:, :-1], past_key_values=cache)
        step = {"attention_mask": mask, "position_ids": torch.tensor([[39]])}
        logits.append(model(ids[:, -1:], past_key_values=cache, **step).logits)
    assert torch.equal(logits[1], logits[0])
    assert torch.equal(logits[2], logits[0])
    weighing = torch.full((1, 1, 1, 40), -0.5)
    cache = make_cache()
    model(ids[:, :-1], past_key_values=cache)
    with pytest.raises(UserError, match="it can hide tokens, not weigh them; got torch.float32 with other values"):
        model(ids[:, -1:], past_key_values=cache, attention_mask=weighing, position_ids=torch.tensor([[39]]))
    assert cache.get_seq_length() == 39
