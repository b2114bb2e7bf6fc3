"""Mode × family × method where coefficients are left out: what is said is what the same calls say by hand, and no sequence
depends on those beside it."""

import pytest
import torch
from families import FAMILIES, RECURRENT
from methods import PLANNED, TOKENWISE

RATE, PROMPT, TURN, NEW, PADDING = 0.1, 36, 11, 10, 7
# Those that rotate, scale or cap scores unlike Llama, which `test_modes.py` runs, and one with layers of another kind.
UNLIKE_LLAMA = ("gemma2", "gemma3", "gpt_neox", "gpt2", "lfm2")
CASES = [
    pytest.param(
        method,
        family,
        marks=[] if method is not TOKENWISE and family.name in UNLIKE_LLAMA else pytest.mark.slow,
        id=f"{method.name}-{family.name}",
    )
    for method in (*PLANNED, TOKENWISE)
    for family in FAMILIES + RECURRENT
]
pytestmark = [pytest.mark.usefixtures("without_gradients"), pytest.mark.parametrize(("method", "family"), CASES)]


def tokens(count, seed, rows=2):
    return torch.randint(1, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def padded():
    """Two sequences, one behind padding, and the mask."""
    ids, mask = tokens(PROMPT, 5), torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :PADDING] = 0
    return ids * mask, mask


def generate(model, ids, mask, cache, **settings):
    settings = {"max_new_tokens": NEW, "do_sample": False, **settings}
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **settings)


def with_turn(text, mask, turn):
    """A text, the next turn, and the mask of both."""
    text = torch.cat([text, turn], dim=1)
    return text, torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)


def by_hand(model, text, mask, cache, chunk=PROMPT):
    """What `generate()` says of a text whose first tokens the cache has read; it, too, says where the prompt ends."""
    past, said = cache.get_seq_length(), text
    cache.expect_prompt(text.shape[1])
    for _ in range(NEW):
        for new in said[:, past:].split(chunk, dim=1):
            seen = mask[:, : past + new.shape[1]]
            positions = (seen.cumsum(1) - 1).clamp(min=0)[:, past:]
            output = model(new, attention_mask=seen, position_ids=positions, past_key_values=cache)
            past += new.shape[1]
        said, mask = with_turn(said, mask, output.logits[:, -1:].argmax(dim=-1))
    return said


def test_two_turns_are_the_same_calls_by_hand(method, family, padded):
    """Nothing is read twice or left out between the turns, and the uncompressed model says something else."""
    ids, mask = padded
    model, turn = family.model(), tokens(TURN, 6)
    dense = generate(model, ids, mask, None)
    make_cache = method.build(model, RATE)
    cache, same = make_cache(), make_cache()
    first = generate(model, ids, mask, cache)
    assert torch.equal(by_hand(model, ids, mask, same), first)
    assert not torch.equal(first, dense)
    text, mask = with_turn(first, mask, turn)
    assert torch.equal(generate(model, text, mask, cache), by_hand(model, text, mask, same))
    assert cache.get_seq_length() == same.get_seq_length() == text.shape[1] + NEW - 1


def test_a_prompt_in_chunks_is_the_same_chunks_by_hand(method, family, padded):
    ids, mask = padded
    model = family.model()
    make_cache = method.build(model, RATE)
    said = generate(model, ids, mask, make_cache(), prefill_chunk_size=13)
    assert torch.equal(by_hand(model, ids, mask, make_cache(), chunk=13), said)


def test_beams_do_not_depend_on_padding_and_other_sequences(method, family, padded):
    ids, mask = padded
    model = family.model()
    make_cache = method.build(model, RATE)
    said = generate(model, ids, mask, make_cache(), num_beams=3)
    for row, start in ((0, 0), (1, PADDING)):
        alone, shown = ids[row : row + 1, start:], mask[row : row + 1, start:]
        assert torch.equal(
            generate(model, alone, shown, make_cache(), num_beams=3)[:, -NEW:], said[row : row + 1, -NEW:]
        )


def test_several_samples_of_a_prompt_are_those_of_the_prompt_repeated(method, family, padded):
    ids, mask = padded
    model = family.model()
    make_cache = method.build(model, RATE)
    torch.manual_seed(3)
    several = generate(model, ids, mask, make_cache(), do_sample=True, num_return_sequences=2)
    torch.manual_seed(3)
    repeated = (each.repeat_interleave(2, dim=0) for each in (ids, mask))
    assert torch.equal(generate(model, *repeated, make_cache(), do_sample=True), several)
    assert not torch.equal(several[0], several[1])
