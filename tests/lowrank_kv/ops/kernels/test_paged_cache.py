"""A cache in pages against the ordinary one: same model, same `generate()`."""

import copy
import weakref
from unittest import mock

import pytest
import torch
from methods import dynakv_model, spread_gates, tiny_model

import dynakv
from dynakv.paged_cache import PagedDynaKVCache
from lowrank_kv.hf.cache import paged_layer
from lowrank_kv.utils.errors import UserError

SETTINGS = {"granularity": 16}


@pytest.fixture
def model(device, request):
    """A compressed model of one layer, or as many as a test's `layers` mark says, whose tokens keep 16, 32, 48 or 64
    coefficients."""
    mark = request.node.get_closest_marker("layers")
    model = tiny_model(hidden_size=128, num_hidden_layers=mark.args[0] if mark else 1)
    dynakv_model(model, 0.4, **SETTINGS)
    spread_gates(model)
    return model.to(device)


def token_ids(model, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(1, 97, (batch, length), generator=generator).to(model.device)


def caches(model, **settings):
    return dynakv.DynaKVCache.from_model(model), PagedDynaKVCache.from_model(model, max_length=96, rate=1.0, **settings)


@pytest.mark.layers(2)
@torch.no_grad()
def test_every_step_is_the_ordinary_cache_s(model):
    ids = token_ids(model, 2, 38)
    steps = (12, 1, 1, 3, 20, 1)  # a prompt, tokens, a short chunk, one that is rebuilt for
    start = 0
    ordinary, paged = caches(model)
    for size in steps:
        expected, found = (
            model(ids[:, start : start + size], past_key_values=cache).logits for cache in (ordinary, paged)
        )
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        start += size
    assert paged.get_seq_length() == ordinary.get_seq_length() == sum(steps)
    ranks = paged.layers[1].key.ranks()
    assert torch.equal(ranks[0].cpu(), ordinary.layers[1].sequences[0].key.ranks().cpu())
    assert len(ranks.unique()) > 1


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        pytest.param({"num_beams": 2}, marks=pytest.mark.slow),
        pytest.param({"do_sample": True, "num_return_sequences": 2}, marks=pytest.mark.slow),
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_generates_what_the_ordinary_cache_does(model, arguments):
    batch = 1 if "prompt_lookup_num_tokens" in arguments else 2
    ids = token_ids(model, batch, 9)
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[0, :4] = 0  # left padding
    answers = []
    for cache in caches(model):
        torch.manual_seed(0)
        options = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False, **arguments}
        answers.append(model.generate(ids, attention_mask=mask, past_key_values=cache, **options).tolist())
    assert answers[0] == answers[1]


@pytest.mark.layers(2)
@torch.no_grad()
def test_copies_of_a_cache_go_their_own_way(model):
    ids = token_ids(model, 1, 14)
    _, cache = caches(model)
    model(ids[:, :10], past_key_values=cache)
    for token in (3, 5):
        # The pages of a copy that is dropped are gone with it, and no others.
        twin = copy.deepcopy(cache)
        assert twin.layers[0].key.pool is twin.layers[1].value.pool is twin.pages.pool
        other = model(torch.tensor([[token]], device=ids.device), past_key_values=twin).logits
    found = model(ids[:, 10:11], past_key_values=cache).logits
    assert not torch.allclose(found, other)
    plain = dynakv.DynaKVCache.from_model(model)
    model(ids[:, :10], past_key_values=plain)
    torch.testing.assert_close(found, model(ids[:, 10:11], past_key_values=plain).logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("cache_dtype", "granularity"), [("int8", 16), ("int4", 32)])
@torch.no_grad()
def test_integers_in_pages(model, cache_dtype, granularity):
    dynakv.configure(model, cache_dtype=cache_dtype, granularity=granularity)
    ids = token_ids(model, 1, 24)
    ordinary, paged = caches(model)
    # However short, a prompt is read as one: nothing of it sees what follows.
    for step in ids.split((8, 1, 1, 14), dim=1):
        expected, found = (model(step, past_key_values=cache).logits for cache in (ordinary, paged))
    # Another order of sums may turn a code into its neighbour.
    assert (found - expected).abs().mean() < 0.02 * expected.std()


def test_bytes_are_those_of_the_tensors_held(model):
    _, cache = caches(model)
    model(token_ids(model, 2, 12), past_key_values=cache)
    assert cache.memory().total == sum({t.data_ptr(): t.nbytes for _, t in cache.tensors_by_kind()}.values())
    assert cache.memory().kinds["coefficients"] == cache.pages.pool.page_PNY.nbytes
    cache.reset()
    assert cache.memory().total == 0
    model(token_ids(model, 5, 12), past_key_values=cache)
    assert cache.layers[0].key.batch == 5


@torch.no_grad()
def test_what_does_not_fit_is_refused(model):
    cache = PagedDynaKVCache.from_model(model, max_length=8, rate=1.0)
    with pytest.raises(UserError, match="`max_length` of the cache is 8, and the text has come to 9 tokens"):
        model(token_ids(model, 1, 9), past_key_values=cache)
    with pytest.raises(UserError, match=r"`pages` \(of a cache: `rate`\) must be larger"):
        model(token_ids(model, 1, 96), past_key_values=PagedDynaKVCache.from_model(model, max_length=96, rate=0.01))
    for settings, message in (
        ({"granularity": 8}, "`granularity` is 8 .* set `granularity` to a multiple of 16"),
        ({"granularity": 16, "cache_dtype": "int8", "group_size": 16}, "`group_size` must be null for a paged cache"),
        (
            {"group_size": None, "eviction": {"keep_ratio": 0.5}},
            "a paged cache does not serve `eviction.keep_ratio` 0.5",
        ),
    ):
        dynakv.configure(model, **settings)
        with pytest.raises(UserError, match=message):
            PagedDynaKVCache.from_model(model, max_length=96)


def nearly_full(model) -> tuple[PagedDynaKVCache, torch.Tensor]:
    """A cache with 48 tokens, so few pages that each layer's keys of another have some and its values not, and tokens."""
    ids = token_ids(model, 1, 80)
    for layer in dynakv.compressors(model).values():
        for side, rank in ((layer.key, 64), (layer.value, 48)):
            side.gate.initialize_at(side.energies(), rank, side.config.threshold)
    cache = PagedDynaKVCache.from_model(model, max_length=96, rate=0.09)
    model(ids[:, :48], past_key_values=cache)
    return cache, ids


@pytest.mark.layers(2)
@torch.no_grad()
def test_a_token_there_are_no_pages_for_is_refused_before_anything_is_written(model):
    """No layer has it, nor its key without its value."""
    cache, ids = nearly_full(model)
    stores, pool = [store for layer in cache.layers for store in (layer.key, layer.value)], cache.pages.pool

    def state() -> list[torch.Tensor]:
        tables = [table for store in stores for table in (store.length_B, store.tile_page_BSK)]
        return [tensor.clone() for tensor in (pool.page_PNY, pool.free_count, *tables)]

    before = state()
    for _ in range(2):
        with pytest.raises(UserError, match=r"`rate`\) must be larger .* of \d+ are free"):
            model(ids[:, 48:49], past_key_values=cache)
    assert all(map(torch.equal, before, state()))
    # Cropped, there is room again.
    cache.crop(-40)
    model(ids[:, 8:9], past_key_values=cache)
    assert cache.get_seq_length() == 9


@pytest.mark.layers(2)
@torch.no_grad()
def test_a_chunk_there_are_no_pages_for_leaves_no_key_without_its_value(model):
    cache, ids = nearly_full(model)
    with pytest.raises(UserError, match=r"`rate`\) must be larger"):
        model(ids[:, 48:], past_key_values=cache)
    for layer in cache.layers:
        assert torch.equal(layer.key.length_B, layer.value.length_B)
    # Layers before the one that refused have the chunk; a crop leaves all alike.
    cache.crop(-40)
    assert {layer.get_seq_length() for layer in cache.layers} == {8}
    ordinary = dynakv.DynaKVCache.from_model(model)
    model(ids[:, :8], past_key_values=ordinary)
    found, expected = (model(ids[:, 8:9], past_key_values=each).logits for each in (cache, ordinary))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_more_queries_than_the_kernels_hold_are_rebuilt_for(model, monkeypatch):
    monkeypatch.setattr(paged_layer, "MAX_QUERY_ROWS", 1)
    ids = token_ids(model, 1, 15)
    ordinary, paged = caches(model)
    with mock.patch.object(paged_layer, "paged_attention", side_effect=AssertionError("too many rows")):
        for step in ids.split((12, 3), dim=1):
            expected, found = (model(step, past_key_values=cache).logits for cache in (ordinary, paged))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_a_mask_may_lie_in_memory_as_it_likes(model):
    ids = token_ids(model, 2, 13)
    ordinary, paged = caches(model)
    seen = torch.ones(2, 1, 1, 13, dtype=torch.bool, device=model.device)
    seen[1, ..., :5] = False
    for cache in (ordinary, paged):
        model(ids[:, :12], past_key_values=cache)
    expected, found = (
        model(ids[:, 12:], past_key_values=cache, attention_mask=mask).logits
        for cache, mask in ((ordinary, seen), (paged, strided(seen)))
    )
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def strided(mask: torch.Tensor) -> torch.Tensor:
    """The same numbers, every other one of a wider tensor's."""
    wide = torch.zeros(*mask.shape[:-1], 2 * mask.shape[-1], dtype=mask.dtype, device=mask.device)
    wide[..., ::2] = mask
    return wide[..., ::2]


def test_a_model_on_several_devices_is_refused(model):
    next(iter(dynakv.compressors(model).values())).to("meta")
    with pytest.raises(UserError, match="a model spread over .*meta .all layers share one device's pages"):
        PagedDynaKVCache.from_model(model, max_length=96)


@pytest.mark.layers(2)
@torch.no_grad()
def test_pages_are_given_up_and_never_shared(model):
    ids = token_ids(model, 1, 20)
    _, cache = caches(model)
    model(ids, past_key_values=cache)
    pages = weakref.ref(cache.pages.pool.page_PNY)
    cache.reset()
    assert pages() is None
    twin = copy.deepcopy(cache)
    for one in (cache, twin):
        model(ids, past_key_values=one)
    assert cache.layers[0].key.pool is cache.layers[1].value.pool is not twin.layers[0].key.pool
    assert twin.nbytes == cache.nbytes


@pytest.mark.layers(2)
@torch.no_grad()
def test_a_cropped_text_makes_room_for_another_number_of_sequences(model):
    _, cache = caches(model)
    _, fresh = caches(model)
    model(token_ids(model, 2, 20), past_key_values=cache)
    pages = weakref.ref(cache.pages.pool.page_PNY)
    cache.crop(-20)
    assert pages() is None
    ids = token_ids(model, 3, 21)
    for each in (cache, fresh):
        model(ids[:, :20], past_key_values=each)
        each.batch_select_indices(torch.tensor([2, 0, 0], device=ids.device))
    assert cache.nbytes == fresh.nbytes
    found, expected = (model(ids[:, 20:], past_key_values=each).logits for each in (cache, fresh))
    assert torch.equal(found, expected)


@torch.no_grad()
def test_a_first_call_that_failed_leaves_no_pages_for_its_sequences(model):
    _, cache = caches(model)
    with (
        mock.patch.object(paged_layer.PagedLayer, "_append_of", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        model(token_ids(model, 2, 20), past_key_values=cache)
    _, fresh = caches(model)
    for each in (cache, fresh):
        model(token_ids(model, 3, 20), past_key_values=each)
        each.batch_select_indices(torch.tensor([2, 0], device=model.device))
    assert cache.nbytes == fresh.nbytes
    assert all(torch.equal(*pair) for pair in zip(rows_of(cache), rows_of(fresh), strict=True))


def rows_of(cache):
    return [states.clone() for layer in cache.layers for states in layer.dense()]


@pytest.mark.layers(2)
@torch.no_grad()
def test_beams_there_are_no_pages_for_are_refused_before_any_layer_moves(model):
    cache = PagedDynaKVCache.from_model(model, max_length=96, rate=1.0)
    model(token_ids(model, 2, 60), past_key_values=cache)
    before, held = rows_of(cache), cache.pages.free_nbytes()
    pages, more = cache.pages.pool, int(cache.layers[0].key.pages_of_sequences().sum())
    taken = len(pages.take(int(pages.free_count) - more))  # the first store finds its pages
    with pytest.raises(UserError, match=r"`pages` \(of a cache: `rate`\) must be larger"):
        cache.batch_repeat_interleave(2)
    assert all(torch.equal(*pair) for pair in zip(rows_of(cache), before, strict=True))
    pages.free_count += taken
    cache.batch_repeat_interleave(2)
    assert all(torch.equal(new[::2], old) for new, old in zip(rows_of(cache), before, strict=True))
    assert cache.pages.free_nbytes() < held


@pytest.mark.layers(2)
@torch.no_grad()
def test_beams_that_are_cut_short_leave_an_empty_cache(model):
    cache = PagedDynaKVCache.from_model(model, max_length=96, rate=1.0)
    ids = token_ids(model, 2, 20)
    expected = model(ids, past_key_values=cache).logits
    with (
        mock.patch.object(cache.layers[1].value, "_place", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        cache.batch_repeat_interleave(2)
    assert cache.get_seq_length() == 0
    assert torch.equal(model(ids, past_key_values=cache).logits, expected)


@pytest.mark.layers(2)
@pytest.mark.parametrize("end", [15, 17])
@torch.no_grad()
def test_a_call_that_is_cut_short_leaves_no_key_without_its_value(model, end):
    cache = PagedDynaKVCache.from_model(model, max_length=96, rate=1.0)
    ids = token_ids(model, 2, 18)
    model(ids[:, :14], past_key_values=cache)
    expected = model(ids[:, 14:], past_key_values=copy.deepcopy(cache)).logits
    layer, append = cache.layers[1], paged_layer.gated_append

    def appended(*args, store, **settings):
        if store is layer.value:
            raise KeyboardInterrupt
        append(*args, store=store, **settings)

    with (
        mock.patch.object(paged_layer, "gated_append", appended),  # a token's way
        mock.patch.object(layer.value, "append", side_effect=KeyboardInterrupt),  # that of several
        pytest.raises(KeyboardInterrupt),
    ):
        model(ids[:, 14:end], past_key_values=cache)
    assert torch.equal(layer.key.length_B, layer.value.length_B)
    cache.crop(0)
    assert {each.get_seq_length() for each in cache.layers} == {14}
    torch.testing.assert_close(model(ids[:, 14:], past_key_values=cache).logits, expected, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_a_kernel_takes_no_weights_beyond_its_dtype(model):
    codec = next(iter(dynakv.compressors(model).values())).key
    layer = mock.Mock(dtype=torch.float16, device=model.device)
    assert paged_layer.PagedLayer._append_of(layer, codec) is not None
    codec.gate.input_scale.mul_(1e9)
    assert paged_layer.PagedLayer._append_of(layer, codec) is None


@pytest.mark.layers(2)
@pytest.mark.parametrize("without", [0, 1])
@torch.no_grad()
def test_pages_are_counted_where_a_layer_appends_without_the_kernel(model, monkeypatch, without):
    """Were one layer to append by torch and the other by the kernel, this one would take pages that nobody has reserved."""
    append_of = paged_layer.PagedLayer._append_of
    monkeypatch.setattr(
        paged_layer.PagedLayer,
        "_append_of",
        lambda layer, codec: None if codec is cache.layers[without].codec.key else append_of(layer, codec),
    )
    cache = PagedDynaKVCache.from_model(model, max_length=96, rate=0.05)
    ids, pool = token_ids(model, 1, 96), cache.layers[0].shared_page_pool
    model(ids[:, :54], past_key_values=cache)

    def decode():
        for i in range(54, 96):
            model(ids[:, i : i + 1], past_key_values=cache)
            assert pool.pool._min_free <= int(pool.pool.free_count)

    with pytest.raises(UserError, match="`pages` .of a cache: `rate`. must be larger"):
        decode()
