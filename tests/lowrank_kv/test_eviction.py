"""SnapKV's choice of tokens, alone and together with methods of every kind."""

import pytest
import torch
from evicting_caches import MAKERS, make_dynakv, places_of
from methods import tiny_model
from old_transformers import skip_what_it_gets_wrong

import dynakv
from lowrank_kv.eviction import Eviction, top_scores
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVConfig

PROMPT = 40
METHODS = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@pytest.fixture
def ids():
    return torch.randint(1, 97, (1, PROMPT), generator=torch.Generator().manual_seed(5))


def test_of_equal_scores_the_first_are_kept_whatever_is_beside_them():
    # Many, so that an unstable sort would show; padding is at the front of one sequence and missing in the other.
    score = torch.randint(0, 4, (2, 5000), generator=torch.Generator().manual_seed(0)).float()
    padded = torch.cat([torch.full((2, 333), -torch.inf), score], dim=1)
    for count in (1, 700, 2600, 5000):
        actual = top_scores(score, count)
        expected = [sorted(sorted(range(5000), key=lambda t: (-row[t], t))[:count]) for row in score.tolist()]
        assert actual.tolist() == expected
        assert torch.equal(top_scores(padded, count), actual + 333)


def test_scores_are_the_windows_attention():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(6, 20, 8, generator=generator)
    key = torch.randn(2, 20, 8, generator=generator)
    present = torch.arange(20) >= 3
    eviction = Eviction(keep_ratio=0.5, window_size=5, kernel_size=3)
    for parts in (1, 2):
        actual = eviction.scores(query, key, 0.3, present, parts=parts)
        expected = torch.zeros(2, 20, dtype=torch.double)
        for head in range(6):
            for place in range(15, 20):
                score = (key[head // 3, 3 : place + 1].double() @ query[head, place].double()) * 0.3
                expected[head // 3, 3 : place + 1] += score.softmax(0)
        expected = expected.view(parts, -1, 20).sum(1)
        pooled = torch.stack([expected[:, max(0, t - 1) : min(t + 2, 15)].amax(1) for t in range(15)], dim=1)
        torch.testing.assert_close(actual[:, 3:15].double(), pooled[:, 3:], atol=1e-5, rtol=0)
        assert (actual[:, 15:] == torch.inf).all()
        assert (actual[:, :3] == -torch.inf).all()


def test_rows_that_stay_are_of_the_best_scores_and_of_no_prompt():
    eviction = Eviction(keep_ratio=0.6, window_size=1)
    position = torch.tensor([[0, 2, 5, 6, 8, 9, 12]])  # the prompt is 5 to 9, of which 7 is kept elsewhere
    score = torch.tensor([[3.0, 1.0, 9.0, 4.0, 2.0], [1.0, 5.0, 9.0, 3.0, 2.0]])
    settings = {"prompt": slice(5, 10), "beside": 1}
    rows, least = eviction.rows_kept(score, position, **settings)
    assert rows.tolist() == [[0, 1, 2, 4, 6], [0, 1, 3, 4, 6]]
    assert least == 10  # no part has the token at 9
    rows, least = eviction.rows_kept(score[:1].flip(1), position, **settings)
    assert (rows.tolist(), least) == ([[0, 1, 3, 5, 6]], 9)
    padded = torch.tensor([[-torch.inf, 1.0, 9.0, 4.0, 2.0]])
    rows, _ = eviction.rows_kept(padded, position, **settings)
    assert rows.tolist() == [[0, 1, 4, 6]]  # two of the four that are there, the other beside
    assert Eviction(keep_ratio=0.6, window_size=5).rows_kept(score, position, **settings) is None


@torch.no_grad()
@METHODS
def test_a_token_attends_to_what_was_kept_and_to_nothing_else(make, ids):
    # With one layer the dense model can be told which tokens to see.
    model = tiny_model(num_hidden_layers=1)
    make_cache = make(model, 1.0, 0.5)
    cache = make_cache()
    model(ids, past_key_values=cache, use_cache=True)
    places = places_of(cache.layers[0].sequences[0])
    assert places.shape[1] == PROMPT // 2
    token = torch.tensor([[7]])
    actual = model(token, past_key_values=cache, use_cache=True).logits
    if len(places) == 1:
        seen = torch.zeros(1, PROMPT + 1, dtype=torch.long)
        seen[0, places[0]] = 1
        seen[0, -1] = 1
        positions = torch.arange(PROMPT + 1)[None]
        dynakv_layers = [m for m in model.modules() if "kv_compressor" in getattr(m, "_modules", {})]
        if dynakv_layers:
            dynakv.detach(model)
        dense = model(torch.cat([ids, token], dim=1), use_cache=False, attention_mask=seen, position_ids=positions)
        torch.testing.assert_close(actual[:, -1], dense.logits[:, -1], atol=1e-4, rtol=0)
    else:
        assert not torch.equal(places[0], places[1]), "heads must choose for themselves"


@METHODS
def test_a_prompt_may_be_read_with_gradients(make, ids):
    model = tiny_model()
    make_cache = make(model, 1.0, 0.5)
    with torch.no_grad():
        expected = model(ids, past_key_values=make_cache()).logits
    cache = make_cache()
    found = model(ids, past_key_values=cache).logits
    assert found.requires_grad
    torch.testing.assert_close(found.detach(), expected)
    with torch.no_grad():
        model(ids[:, :1], past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("padding", [13, PROMPT - 3])  # the latter leaves less than a window
@METHODS
def test_a_padded_batch_generates_what_its_sequences_do_alone(make, padding):
    ids = torch.randint(1, 97, (2, PROMPT), generator=torch.Generator().manual_seed(5))
    model = tiny_model()
    make_cache = make(model, 0.5, 0.4)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    batch = model.generate(ids * mask, attention_mask=mask, past_key_values=make_cache(), **options)
    for row, start in ((0, 0), (1, padding)):
        part = ids[row : row + 1, start:]
        alone = model.generate(part, attention_mask=torch.ones_like(part), past_key_values=make_cache(), **options)
        assert torch.equal(batch[row, PROMPT:], alone[0, PROMPT - start :])


@torch.no_grad()
@METHODS
def test_later_turns_see_the_kept_tokens_at_their_own_places(make, ids):
    """Few tokens at a time, one at a time and many at once agree after an eviction."""
    turn = torch.randint(1, 97, (1, 12), generator=torch.Generator().manual_seed(6))
    outputs = []
    for sizes in ([12], [1] * 12, [5, 7]):
        model = tiny_model()
        cache = make(model, 1.0, 0.5)()
        model(ids, past_key_values=cache, use_cache=True)
        outputs.append(
            torch.cat([model(p, past_key_values=cache, use_cache=True).logits for p in turn.split(sizes, dim=1)], dim=1)
        )
        assert cache.get_seq_length() == PROMPT + 12
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], atol=1e-4, rtol=0)


@torch.no_grad()
@METHODS
def test_every_long_turn_is_thinned_and_rebuilt_attention_agrees(make, ids):
    turn = torch.randint(1, 97, (1, 30), generator=torch.Generator().manual_seed(6))
    model = tiny_model()
    cache = make(model, 1.0, 0.5)()
    model(ids, past_key_values=cache, use_cache=True)
    logits = model(turn, past_key_values=cache, use_cache=True).logits
    assert places_of(cache.layers[0].sequences[0]).shape[1] == (PROMPT + 30) // 2
    # The same turn read a few tokens at a time attends in the compressed form and is not thinned.
    model = tiny_model()
    cache = make(model, 1.0, 0.5)()
    model(ids, past_key_values=cache, use_cache=True)
    steps = [model(part, past_key_values=cache, use_cache=True).logits for part in turn.split(6, dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), logits, atol=1e-4, rtol=0)


@torch.no_grad()
@METHODS
def test_beams_copies_and_crops_keep_the_state(make, ids):
    model = tiny_model()
    make_cache = make(model, 0.5, 0.5)
    cache = make_cache()
    model(ids.repeat(2, 1), past_key_values=cache, use_cache=True)
    expected = model(torch.tensor([[5], [5]]), past_key_values=cache, use_cache=True).logits
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([1, 1]))
    again = model(torch.tensor([[5], [5]]), past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=0)
    cache.crop(-3)  # the window, which is kept, may be cropped
    with pytest.raises(UserError, match="evicted"):
        cache.crop(-PROMPT // 2)
    assert cache.get_seq_length() == PROMPT - 2
    beams = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert model.generate(ids, past_key_values=make_cache(), **beams).shape == (1, PROMPT + 6)


def written(model, ids, cache, **options):
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)


def thinned_by_generate(make, ids, **options):
    """The cache after generate() has read a prompt at full rank, and what it wrote."""
    model = tiny_model()
    cache = make(model, 1.0, 0.5)()
    return cache, written(model, ids, cache, **{"max_new_tokens": 8} | options)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [23, 17, 5, 1])
@METHODS
def test_a_prompt_is_thinned_once_in_whatever_chunks_it_comes(make, ids, chunk):
    whole, written = thinned_by_generate(make, ids)
    parts, same = thinned_by_generate(make, ids, prefill_chunk_size=chunk)
    for layer, expected in zip(parts.layers, whole.layers, strict=True):
        places, kept = (places_of(each.sequences[0]) for each in (layer, expected))
        assert places.shape == kept.shape == (len(kept), PROMPT // 2 + 7)
        if make is make_dynakv:  # which tokens of OjaKV's still wait whole, and so stay, is a matter of chunks
            assert torch.equal(places, kept)
            assert torch.equal(same, written)


@torch.no_grad()
@METHODS
def test_a_prompts_last_queries_are_held_between_its_chunks_and_counted(make):
    ids = torch.randint(1, 97, (2, PROMPT), generator=torch.Generator().manual_seed(5))
    model = tiny_model()
    make_cache = make(model, 1.0, 0.5)
    places = {}
    for order in ([0, 1], [1, 0]):
        cache = make_cache()
        cache.expect_prompt(PROMPT)
        model(ids[:, :36], past_key_values=cache, use_cache=True)
        cache.reorder_cache(torch.tensor(order))
        held = sum(
            tensor.nbytes for layer in cache.layers for s in layer.sequences for _, tensor in s.tensors_by_kind()
        )
        held += sum(tensor.nbytes for tensor in cache.history.tensors()) if cache.history else 0
        assert cache.nbytes - held == len(cache.layers) * 2 * 4 * 4 * 16 * 4  # sequences, heads, queries, dims, bytes
        model(ids[order, 36:], past_key_values=cache, use_cache=True)
        places[order[0]] = [places_of(sequence) for sequence in cache.layers[0].sequences]
    assert all(torch.equal(one, other) for one, other in zip(places[0], reversed(places[1]), strict=True))
    assert not torch.equal(*places[0])
    assert places[0][0].shape[1] == PROMPT // 2


@torch.no_grad()
@METHODS
def test_a_prompt_that_is_cropped_before_its_end_is_thinned_at_its_end(make, ids):
    model = tiny_model()
    make_cache = make(model, 1.0, 0.5)
    held = []
    for cropped in (False, True):
        cache = make_cache()
        cache.expect_prompt(PROMPT)
        model(ids[:, :20], past_key_values=cache, use_cache=True)
        if cropped:  # as after a chunk that was refused
            model(ids[:, 20:30], past_key_values=cache, use_cache=True)
            cache.crop(-10)
        for part in ids[:, 20:].split(10, dim=1):
            model(part, past_key_values=cache, use_cache=True)
        held.append(places_of(cache.layers[0].sequences[0]).shape[1])
    assert held == [PROMPT // 2, PROMPT // 2]


@torch.no_grad()
@METHODS
def test_what_comes_with_the_end_of_a_prompt_is_no_part_of_it(make, ids):
    turn = torch.randint(1, 97, (1, 20), generator=torch.Generator().manual_seed(6))
    text = torch.cat([ids, turn], dim=1)
    for sizes in ([60], [30, 30], [10, 50]):
        cache = make(model := tiny_model(), 1.0, 0.5)()
        cache.expect_prompt(PROMPT)
        for part in text.split(sizes, dim=1):
            model(part, past_key_values=cache, use_cache=True)
        places = places_of(cache.layers[0].sequences[0])
        assert places.shape[1] == PROMPT // 2 + 20
        assert (places[:, -24:] == torch.arange(36, 60)).all()  # the window and what came after it


@torch.no_grad()
@METHODS
def test_a_later_prompt_in_chunks_thins_itself_alone(make, ids):
    skip_what_it_gets_wrong("the positions of chunks behind a cache")
    turn = torch.randint(1, 97, (1, 30), generator=torch.Generator().manual_seed(6))
    model = tiny_model()
    cache = make(model, 1.0, 0.5)()
    text = torch.cat([written(model, ids, cache, max_new_tokens=2), turn], dim=1)
    options = {"attention_mask": torch.ones_like(text), "max_new_tokens": 1, "do_sample": False}
    model.generate(text, past_key_values=cache, prefill_chunk_size=7, **options)
    # The last token written was not in the cache yet, and came with the second prompt.
    assert places_of(cache.layers[0].sequences[0]).shape[1] == PROMPT // 2 + 1 + 16


@torch.no_grad()
@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_drafts_beside_a_prompt_see_what_is_left_of_it(ids, rate):
    """The first call of a generate() that drafts brings the prompt and drafts: of a text's own n-grams all of them wrong, of
    an assistant most of them right."""
    for text, drafts in (
        (ids[:, :10].repeat(1, 4), {"prompt_lookup_num_tokens": 20}),
        (ids, {"assistant_model": tiny_model()}),
    ):
        model = tiny_model()
        make_cache = make_dynakv(model, rate, 0.5)
        expected = written(model, text, make_cache())
        cache = make_cache()
        assert torch.equal(written(model, text, cache, **drafts), expected)
        assert places_of(cache.layers[0].sequences[0]).shape[1] <= PROMPT // 2 + 24


@torch.no_grad()
@METHODS
def test_a_refused_crop_leaves_every_layer_as_it_was(make):
    """Layers forget different tokens, so that one may be cropped to where another may not."""
    model = tiny_model()
    make_cache = make(model, 0.5, 0.5)

    def read(seed):
        cache = make_cache()
        ids = torch.randint(1, 97, (1, PROMPT), generator=torch.Generator().manual_seed(seed))
        model(ids, past_key_values=cache, use_cache=True)
        return cache, [layer.sequences[0].min_crop_length for layer in cache.layers]

    # A text of which the first layer could be cropped further than another.
    cache, fixed = next((cache, fixed) for cache, fixed in map(read, range(50)) if fixed[0] < max(fixed))
    with pytest.raises(UserError, match="evicted"):
        cache.crop(fixed[0] - PROMPT)
    assert {layer.get_seq_length() for layer in cache.layers} == {PROMPT}


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_evicts_assists(seed):
    ids = torch.randint(1, 97, (1, PROMPT), generator=torch.Generator().manual_seed(seed))
    assistant = tiny_model()
    make_dynakv(assistant, 0.5, 0.5)
    dense = tiny_model()
    assert torch.equal(written(dense, ids, None, assistant_model=assistant), written(dense, ids, None))


@torch.no_grad()
def test_the_bytes_are_those_of_the_product(ids):
    rates = {}
    for keep in (1.0, 0.25):
        model = tiny_model()
        cache = make_dynakv(model, 1.0, keep)()
        model(ids.repeat(1, 5), past_key_values=cache, use_cache=True)
        assert cache.nbytes == sum(tensor.nbytes for _, tensor in cache.tensors_by_kind())
        rates[keep] = cache.rate
    # Places of what is kept cost 4 bytes a token and layer.
    assert 0.25 <= rates[0.25] / rates[1.0] < 0.25 * 1.05 + 0.01


@pytest.mark.parametrize("settings", [{"keep_ratio": 0.0}, {"keep_ratio": 1.5}, {"window_size": 0}, {"kernel_size": 2}])
def test_wrong_settings_are_refused(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        OjaKVConfig.preset("ojakv-joint", eviction=settings)


@pytest.mark.parametrize("name", ["dynakv", "ojakv-joint"])
@torch.no_grad()
def test_text_that_is_padded_on_the_right_is_refused(name):
    """Its last queries would be those of padding, which would choose."""
    model = tiny_model()
    make_cache = MAKERS[name](model, 1.0, 0.5)
    ids = torch.randint(1, 97, (2, PROMPT), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0
    cache = make_cache()
    with pytest.raises(UserError, match="padded on the right.*padding_side = 'left'"):
        model(ids, attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 0
    model(ids, attention_mask=mask.flip(1), past_key_values=make_cache())


def test_what_keeps_all_of_a_prompt_evicts_nothing():
    keep = {"keep_ratio": 0.3}
    for kept in ({"keep_prompt_full_rank": True}, {"full_rank_ratio": 1.0}):
        with pytest.raises(UserError, match="`eviction.keep_ratio` must be 1 where all of a prompt stays"):
            OjaKVConfig.preset("ojakv-pf", eviction=keep, **kept)
