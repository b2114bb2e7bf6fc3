"""Directions of a sequence's own beside a shared basis."""

import pytest
import torch
from methods import METHODS, calibration_of, tiny_model
from tensors_held import found_tensors

import dynakv
from lowrank_kv.calibration.bit_plans import coded_bases
from lowrank_kv.hf.cache.windowed.adaptive_store import AdaptiveStore
from lowrank_kv.hf.cache.windowed.own_directions import OwnDirections, SharedSpace, leading_directions
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig, make_plan

WIDTH, RANK, TOKENS = 24, 10, 300


@pytest.fixture
def shared():
    generator = torch.Generator().manual_seed(1)
    weight_C = torch.logspace(0, -3, WIDTH)
    decoder_WC = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator)).Q * torch.linspace(1, 2, WIDTH)
    return SharedSpace(weight_C=weight_C, decoder_CW=decoder_WC.mT.contiguous())


@pytest.fixture
def planted(shared):
    """A text's coefficients: small, and large along two weighted directions of those that are dropped."""
    generator = torch.Generator().manual_seed(2)
    direction_CK = torch.zeros(WIDTH, 2)
    direction_CK[RANK:] = torch.linalg.qr(torch.randn(WIDTH - RANK, 2, generator=generator)).Q
    amount_NK = torch.randn(TOKENS, 2, generator=generator) * torch.tensor([0.4, 0.2])
    weighted_NC = 0.001 * torch.randn(TOKENS, WIDTH, generator=generator) + amount_NK @ direction_CK.mT
    return weighted_NC / shared.weight_C, direction_CK


def ranks(rank: int = RANK) -> torch.Tensor:
    return torch.full((TOKENS,), rank)


def test_what_is_dropped_is_found(shared, planted):
    coef_NC, direction_CK = planted
    own = OwnDirections.find(coef_NC, ranks(), shared.weight_C, 2, tokens=TOKENS)
    overlap_KK = direction_CK.mT @ (own.code_CK * own.scale_K)
    torch.testing.assert_close(overlap_KK.abs(), torch.eye(2), atol=0.02, rtol=0)
    expected_K = ((coef_NC * shared.weight_C) @ direction_CK).square().mean(dim=0).sqrt()
    torch.testing.assert_close(own.size_K, expected_K, rtol=0.02, atol=0)
    # Shared coefficients that matter more, of a root of 0.4 or 0.2 and above, stand before them.
    before = [int((shared.weight_C >= size).sum()) for size in own.size_K]
    assert own.places == (before[0], before[1] + 1)


def test_the_range_finder_finds_what_a_decomposition_finds():
    row_NC = torch.randn(200, 40, generator=torch.Generator().manual_seed(3)) * torch.logspace(0, -2, 40)
    found_CK = leading_directions(row_NC, 3)
    exact_CK = torch.linalg.svd(row_NC.double()).Vh[:3].mT.float()
    torch.testing.assert_close(found_CK.mT @ found_CK, torch.eye(3), atol=1e-5, rtol=0)
    held = (row_NC @ found_CK).square().sum() / (row_NC @ exact_CK).square().sum()
    assert held > 1 - 1e-3


def test_the_same_rows_have_the_same_directions_whatever_was_drawn_before():
    row_NC = torch.randn(50, 20)
    first_CK, state = leading_directions(row_NC, 2), torch.random.get_rng_state()
    torch.randn(7)
    torch.testing.assert_close(leading_directions(row_NC, 2), first_CK, atol=0, rtol=0)
    torch.random.set_rng_state(state)
    leading_directions(row_NC, 2)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_all_coefficients_of_a_row_rebuild_its_state(shared, planted):
    coef_NC, _ = planted
    own = OwnDirections.find(coef_NC, ranks(), shared.weight_C, 2, tokens=TOKENS)
    whole = WIDTH + 2  # with the own ones there are two more than the basis has
    row_NR, decoder_RW = own.encode(coef_NC, shared, whole), own.decoder(shared, whole)
    state_NW = coef_NC.double() @ shared.decoder_CW.double()
    error = row_NR.double() @ decoder_RW.double() - state_NW
    assert error.norm() < 1e-5 * state_NW.norm()


def test_own_directions_lose_less_than_the_last_coefficients_that_make_room(shared, planted):
    coef_NC, _ = planted
    own = OwnDirections.find(coef_NC, ranks(), shared.weight_C, 2, tokens=TOKENS)
    state_NW = coef_NC @ shared.decoder_CW
    without = coef_NC[:, :RANK] @ shared.decoder_CW[:RANK]
    with_own = own.encode(coef_NC, shared, RANK) @ own.decoder(shared, RANK)
    inverse_WC = torch.linalg.inv(shared.decoder_CW)
    weighted = [((state_NW - rebuilt) @ inverse_WC * shared.weight_C).norm() for rebuilt in (without, with_own)]
    assert weighted[1] < 0.05 * weighted[0]


def test_directions_that_do_not_fit_a_row_are_left_out(shared):
    own = OwnDirections(
        code_CK=torch.ones(WIDTH, 2, dtype=torch.int8), scale_K=torch.ones(2), size_K=torch.ones(2), places=(3, 9)
    )
    coef_NC = torch.arange(float(WIDTH))[None]
    assert own.encode(coef_NC, shared, 5).shape == (1, 5)
    assert own.decoder(shared, 5).shape == (5, WIDTH)
    torch.testing.assert_close(own.decoder(shared, 5)[4], shared.decoder_CW[3], atol=0, rtol=0)
    torch.testing.assert_close(own.decoder(shared, 12)[10:], shared.decoder_CW[8:10], atol=0, rtol=0)


def test_a_direction_pays_for_its_place_and_its_bytes(shared):
    """A text whose dropped coefficients have one direction of known size, in units of the last that is kept."""
    generator = torch.Generator().manual_seed(4)
    direction_C = torch.zeros(WIDTH)
    direction_C[-1] = 1
    for tokens in (60, 6000):
        least = 1 + 4 * OwnDirections.nbytes(WIDTH, 1) / tokens
        amount_N = torch.randn(tokens, generator=generator)
        amount_N /= amount_N.square().mean().sqrt()
        for share, is_found in ((0.98, False), (1.02, True)):
            size = shared.weight_C[RANK - 1] * (share * least) ** 0.5
            weighted_NC = amount_N[:, None] * size * direction_C
            rank_N = torch.full((tokens,), RANK)
            own = OwnDirections.find(weighted_NC / shared.weight_C, rank_N, shared.weight_C, 2, tokens=tokens)
            assert (own is not None) == is_found
            assert own is None or own.code_CK.shape == (WIDTH, 1)


def test_tokens_count_by_what_their_class_drops(shared):
    """Of two equal directions that one belongs to the tokens that keep more, whose last coefficient matters less: it saves
    more."""
    weighted_NC = torch.zeros(TOKENS, WIDTH)
    weighted_NC[::2, 20] = weighted_NC[1::2, 21] = 0.3
    rank_N = torch.full((TOKENS,), 5)
    rank_N[1::2] = 15
    own = OwnDirections.find(weighted_NC / shared.weight_C, rank_N, shared.weight_C, 1, tokens=TOKENS)
    assert own.code_CK[:, 0].abs().argmax() == 21


def test_nothing_is_found_where_nothing_is_dropped(shared, planted):
    coef_NC, _ = planted
    assert OwnDirections.find(coef_NC, ranks(WIDTH), shared.weight_C, 2, tokens=TOKENS) is None
    assert OwnDirections.find(torch.zeros(TOKENS, WIDTH), ranks(), shared.weight_C, 2, tokens=TOKENS) is None


# -- in a cache --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def calibration(model):
    """It has seen little of what the texts here say."""
    return calibration_of(model, read=True, words=6)


def cache_of(model, calibration, **settings):
    config = OjaKVConfig.preset("adaptive-mixed", **{"rate": 0.15, "update_period": 4, "recent_window": 3, **settings})
    return OjaKVCache(model, make_plan(calibration, config))


def ids_of(tokens: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(1, 97, (batch, tokens), generator=torch.Generator().manual_seed(5))


def stores(cache) -> list[AdaptiveStore]:
    return [
        store
        for layer in cache.compressed_layers()
        for sequence in layer.sequences
        for store in (sequence.key, sequence.value)
    ]


@torch.no_grad()
@pytest.mark.parametrize("classes", [1, 4])
def test_a_cache_holds_what_its_own_coder_says(model, calibration, monkeypatch, classes):
    appended, append = {}, AdaptiveStore.append

    def recorded(store, coef_1NC):
        appended.setdefault(id(store), []).append(coef_1NC[0])
        append(store, coef_1NC)

    monkeypatch.setattr(AdaptiveStore, "append", recorded)
    cache = cache_of(model, calibration, token_classes=classes)
    for part in ids_of(200).split([180, 10, 10], dim=1):
        model(part, past_key_values=cache)
    adaptive = [store for store in stores(cache) if store.initial.drops_some]
    found = [store for store in adaptive if store.own is not None]
    assert len(found) >= 4
    for store in found:
        plan, shared = store.initial.quantization, store.initial.shared
        coef_NC = torch.cat(appended[id(store)])
        row_NR = store.own.encode(coef_NC, shared, store.initial.rank)
        expected_NR = plan.rounded(row_NR) if classes == 1 else plan.rounded(row_NR, plan.classes(coef_NC))
        operands = store.operands()
        torch.testing.assert_close(operands.coef.rows()[0], expected_NR, atol=1e-6, rtol=1e-6)
        vector_CK = store.own.code_CK.double() * store.own.scale_K
        own_KW = (vector_CK * store.own.size_K / shared.weight_C[:, None]).mT @ shared.decoder_CW.double()
        for j, place in enumerate(store.own.places):
            if place < store.initial.rank:
                torch.testing.assert_close(operands.decoder_PRW[0, place].double(), own_KW[j], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_short_prompts_keep_to_the_shared_basis(model, calibration):
    adaptive = cache_of(model, calibration)
    tokenwise = cache_of(model, calibration, own_directions=0)
    ids = ids_of(adaptive.compressed_layers()[0].config.own_directions_from)  # of which some stay at full rank
    for cache in (adaptive, tokenwise):
        model(ids, past_key_values=cache)
    assert all(store.own is None for store in stores(adaptive))
    following = [model(ids[:, :1], past_key_values=cache).logits for cache in (adaptive, tokenwise)]
    torch.testing.assert_close(following[0], following[1], atol=0, rtol=0)
    assert adaptive.nbytes == tokenwise.nbytes


@pytest.mark.parametrize("chunk", [8, 24, 100])
@torch.no_grad()
def test_chunks_of_a_prompt_wait_to_be_enough(model, calibration, chunk):
    """Directions are found in the first chunks that are enough together, and all tokens are compressed in the end."""
    whole, cache = cache_of(model, calibration), cache_of(model, calibration)
    ids = ids_of(180)
    for each, size in ((whole, None), (cache, chunk)):
        model.generate(ids, past_key_values=each, max_new_tokens=2, do_sample=False, prefill_chunk_size=size)
    found = [store.own is not None for store in stores(whole)]
    assert any(found)
    assert [store.own is not None for store in stores(cache)] == found
    period = cache.compressed_layers()[0].config.update_period  # of which the last of several chunks leaves a rest
    assert all(
        one.coef.length - other.coef.length < period for one, other in zip(stores(whole), stores(cache), strict=True)
    )


@torch.no_grad()
def test_a_cache_that_was_emptied_finds_the_next_texts_directions(model, calibration):
    cache = cache_of(model, calibration)
    model(ids_of(180), past_key_values=cache)
    before = [store.own for store in stores(cache)]
    cache.crop(-180)
    assert all(store.own is None for store in stores(cache))
    other = torch.randint(1, 97, (1, 180), generator=torch.Generator().manual_seed(7))
    model(other, past_key_values=cache)
    pairs = [(old, store.own) for old, store in zip(before, stores(cache), strict=True) if store.own is not None]
    assert pairs
    assert not any(old is not None and torch.equal(old.size_K, own.size_K) for old, own in pairs)


@torch.no_grad()
def test_bytes_are_those_of_the_tensors(model, calibration):
    with_own, without = (cache_of(model, calibration, own_directions=count) for count in (4, 0))
    for cache in (with_own, without):
        model(ids_of(180, 2), past_key_values=cache)
        counted = {tensor.untyped_storage().data_ptr() for _, tensor in cache.tensors_by_kind() if tensor.numel()}
        assert found_tensors(cache) <= counted
    width = model.config.num_key_value_heads * 16
    counts = [len(store.own.places) for store in stores(with_own) if store.own is not None]
    assert counts
    assert with_own.nbytes - without.nbytes == sum(OwnDirections.nbytes(width, count) for count in counts)


@torch.no_grad()
def test_caches_that_take_turns_read_their_own_directions(model, calibration):
    """Caches of one plan share the decoder that was made last."""
    plan = cache_of(model, calibration).layers[0].plan
    texts = [torch.randint(1, 97, (1, 190), generator=torch.Generator().manual_seed(seed)) for seed in (5, 7)]
    alone = []
    for ids in texts:
        cache = OjaKVCache(model, plan)
        alone.append([model(part, past_key_values=cache).logits for part in ids.split([180, *[1] * 10], dim=1)])
    caches = [OjaKVCache(model, plan) for _ in texts]
    for at, part in enumerate([slice(180), *(slice(t, t + 1) for t in range(180, 190))]):
        for ids, cache, expected in zip(texts, caches, alone, strict=True):
            logits = model(ids[:, part], past_key_values=cache).logits
            torch.testing.assert_close(logits, expected[at], atol=0, rtol=0)
    [one, other] = [next(store for store in stores(cache) if store.own is not None) for cache in caches]
    assert one.initial is other.initial
    first = one.operands().basis_PWR
    assert one.operands().basis_PWR is first
    assert not torch.equal(other.operands().basis_PWR, first)
    torch.testing.assert_close(one.operands().basis_PWR, first, atol=0, rtol=0)


@torch.no_grad()
def test_a_learned_coder_has_them_as_the_one_it_starts_from_has(calibration):
    ids = ids_of(200)
    cache = cache_of(tiny := tiny_model(), calibration, update_period=32, recent_window=16)
    expected = [tiny(part, past_key_values=cache).logits for part in ids.split([190, 10], dim=1)]
    learned = tiny_model()
    dynakv.add_compressors(learned, dynakv.DynaKVConfig(rank_policy="plan", own_directions=4))
    dynakv.initialize_from_coders(learned, coded_bases(calibration, 0.15, token_classes=4))
    dynakv.use_dynakv_cache(learned)
    own = dynakv.DynaKVCache.from_model(learned)
    found = [learned(part, past_key_values=own).logits for part in ids.split([190, 10], dim=1)]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert any(store.own is not None for store in stores(own))
    dynakv.configure(learned, own_directions=0)
    without = dynakv.DynaKVCache.from_model(learned)
    learned(ids[:, :190], past_key_values=without)
    assert without.nbytes < own.nbytes


def test_own_directions_need_a_plan_of_bits():
    with pytest.raises(UserError, match=r"`own_directions` must be 0 where `rank_policy` is gate.*got 2"):
        dynakv.DynaKVConfig(rank_policy="gate", own_directions=2)
    with pytest.raises(UserError, match=r"`own_directions` must be 0 with `cache_dtype: model`.*got 2"):
        OjaKVConfig(own_directions=2)
    with pytest.raises(UserError, match="`own_directions` must be zero or positive; got -1"):
        OjaKVConfig(own_directions=-1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["adaptive-mixed", "dynakv-adaptive-plan"])
def test_what_the_contracts_run_over_has_own_directions(name):
    [method] = [method for method in METHODS if method.name == name]
    model = tiny_model()
    cache = method.build(model, 0.4)()
    model(ids_of(24), past_key_values=cache)
    assert any(store.own is not None for store in stores(cache))


def test_a_direction_beyond_the_rows_that_would_hold_it_saves_nothing(shared):
    """What is dropped is large along one direction, but half of the tokens have rows that end before its place."""
    generator = torch.Generator().manual_seed(6)
    direction_C = torch.zeros(WIDTH)
    direction_C[-1] = 1
    amount_N = torch.randn(TOKENS, generator=generator)
    size = shared.weight_C[RANK - 1] * 1.4
    coef_NC = amount_N[:, None] * size * direction_C / shared.weight_C
    own = OwnDirections.find(coef_NC, ranks(), shared.weight_C, 1, tokens=TOKENS)
    [place] = own.places
    assert place < RANK
    shorter_N = ranks()
    shorter_N[::2] = place
    assert OwnDirections.find(coef_NC, shorter_N, shared.weight_C, 1, tokens=TOKENS) is None


@torch.no_grad()
@pytest.mark.parametrize(
    "retention",
    [{}, {"update_period": 1, "recent_window": 0}, {"keep_prompt_full_rank": True}],
    ids=["waiting", "at once", "prompt at full rank"],
)
def test_drafts_that_are_taken_back_leave_no_trace_in_the_directions(model, calibration, retention):
    ids = ids_of(61)

    def after(draft: torch.Tensor | None):
        cache = cache_of(model, calibration, own_directions_from=32, **retention)
        for layer in cache.compressed_layers():
            layer.activate_past_recording()
        model(ids[:, :60] if draft is None else torch.cat([ids[:, :60], draft], 1), past_key_values=cache)
        if draft is not None:
            cache.crop(-draft.shape[1])
        logits = model(ids[:, 60:], past_key_values=cache).logits
        return logits, [store.own for store in stores(cache)]

    expected, owns = after(None)
    assert any(own is not None for own in owns)
    drafted, found = after(torch.randint(1, 97, (1, 10), generator=torch.Generator().manual_seed(50)))
    torch.testing.assert_close(drafted, expected, atol=1e-4, rtol=0)
    for own, other in zip(found, owns, strict=True):
        assert (own is None) == (other is None)
        assert own is None or torch.equal(own.code_CK, other.code_CK)


@torch.no_grad()
def test_beams_count_what_they_share_once(model, calibration):
    cache = cache_of(model, calibration)
    model(ids_of(180), past_key_values=cache)
    cache.batch_repeat_interleave(3)
    assert any(store.own is not None for store in stores(cache))
    storages = [tensor.untyped_storage() for _, tensor in cache.tensors_by_kind()]
    assert cache.nbytes == sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
