"""The paged store against a ragged store for each of its sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_kv.stores.page_pool import PagePool
from lowrank_kv.stores.paged import PagedStore
from lowrank_kv.stores.quantization import IntegerQuantization
from lowrank_kv.stores.ragged import RaggedStore
from lowrank_kv.utils.errors import UserError

WIDTH, GRANULE, BATCH, CAPACITY = 64, 32, 2, 120
CPU = torch.device("cpu")
KINDS = [None, IntegerQuantization(bits=8), IntegerQuantization(bits=4)]


def new_stores(quantization=None, pages=120):
    pool = PagePool(pages, tokens=16, granule=GRANULE, dtype=torch.float32, device=CPU, quantization=quantization)
    paged = PagedStore(BATCH, WIDTH, capacity=CAPACITY, pool=pool)
    ragged = [RaggedStore(WIDTH, dtype=torch.float32, device=CPU, quantization=quantization) for _ in range(BATCH)]
    return paged, ragged


def check(paged: PagedStore, ragged: list[RaggedStore]) -> None:
    dense, ranks = paged.dense(), paged.ranks()
    assert paged.length_B.tolist() == [store.length for store in ragged]
    used = 0
    for b, store in enumerate(ragged):
        assert torch.equal(dense[b, : store.length], store.dense())
        assert torch.equal(ranks[b, : store.length], store.ranks())
        tiles = int(paged.tiles_B[b])
        assert (paged.tile_rows_BS[b, :tiles] > 0).all()
        assert not paged.tile_rows_BS[b, tiles:].any()
        used += int(paged.tile_granules_BS[b].sum())
    # Every page is either a tile's or free, once.
    pool, free = paged.pool, int(paged.pool.free_count)
    granule = torch.arange(paged.granules)
    taken = paged.tile_page_BSK[(granule < paged.tile_granules_BS[..., None]) & (paged.tile_rows_BS > 0)[..., None]]
    assert len(taken) == used
    assert sorted([*taken.tolist(), *pool.free_P[:free].tolist()]) == list(range(pool.pages))


operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(0, WIDTH // GRANULE), min_size=1, max_size=24)),
        st.tuples(st.just("crop"), st.integers(0, 20)),
        st.tuples(st.just("select"), st.just(0)),
    ),
    max_size=8,
)


@pytest.mark.parametrize("quantization", KINDS, ids=["model", "int8", "int4"])
@settings(max_examples=40, deadline=None)
@given(operations)
def test_any_sequence_of_operations_matches_ragged_stores(quantization, steps):
    paged, ragged = new_stores(quantization)
    generator = torch.Generator().manual_seed(0)
    for name, argument in steps:
        longest = max(store.length for store in ragged)
        if name == "append" and longest + len(argument) <= CAPACITY:
            coef = torch.randn(BATCH, len(argument), WIDTH, generator=generator)
            rank = torch.tensor([argument, argument[::-1]]) * GRANULE
            # What lies beyond a row's rank must never be read.
            coef[torch.arange(WIDTH) >= rank[..., None]] = torch.nan
            paged.append(coef, rank)
            for b, store in enumerate(ragged):
                store.append(coef[b], rank[b])
        elif name == "crop":
            lengths = torch.tensor([max(0, store.length - argument * (b + 1)) for b, store in enumerate(ragged)])
            paged.crop(lengths)
            for store, length in zip(ragged, lengths.tolist(), strict=True):
                store.crop(length)
        elif name == "select":
            paged.select(torch.tensor([1, 1]))
            ragged = [ragged[1], ragged[1].clone()]
        check(paged, ragged)


def test_growing_copies_nothing_and_fills_its_tiles():
    paged, _ = new_stores()

    def addresses():
        return [tensor.data_ptr() for _, tensor in paged.tensors_by_kind()] + [paged.pool.page_PNY.data_ptr()]

    before = addresses()
    for _ in range(110):
        paged.append(torch.randn(BATCH, 1, WIDTH), torch.full((BATCH, 1), GRANULE))
    paged.crop(100)
    assert before == addresses()
    assert paged.tiles_B.tolist() == [7, 7]  # of 16 rows
    assert int(paged.pool.free_count) == 120 - 14


def test_stores_of_one_pool_do_not_touch_each_other():
    paged, ragged = new_stores()
    other = PagedStore(1, WIDTH, capacity=CAPACITY, pool=paged.pool)
    coef, rank = torch.randn(BATCH, 40, WIDTH), torch.full((BATCH, 40), WIDTH)
    paged.append(coef, rank)
    other.append(-coef[:1], rank[:1])
    paged.crop(3)
    other.append(-coef[1:], rank[1:])
    assert torch.equal(paged.dense(), coef[:, :3])
    assert torch.equal(other.dense()[0], -coef.flatten(0, 1))


def test_what_cannot_be_held_is_refused():
    paged, _ = new_stores(pages=8)
    with pytest.raises(UserError, match="`rank_BT` must be multiples of 32 from 0 to 64"):
        paged.append(torch.zeros(BATCH, 1, WIDTH), torch.full((BATCH, 1), 8))
    with pytest.raises(UserError, match="`rank_BT` must be multiples of 32 from 0 to 64"):
        paged.append(torch.zeros(BATCH, 1, WIDTH), torch.full((BATCH, 1), 96))
    with pytest.raises(UserError, match="`capacity` must be at least 121"):
        paged.append(torch.zeros(BATCH, 121, WIDTH), torch.full((BATCH, 121), 0))
    with pytest.raises(UserError, match="`pages` .* must be larger"):
        paged.append(torch.zeros(BATCH, 40, WIDTH), torch.full((BATCH, 40), WIDTH))
    paged.append(torch.zeros(BATCH, 20, WIDTH), torch.full((BATCH, 20), WIDTH))
    with pytest.raises(UserError, match="0 of 8 are free"):
        paged.pool.reserve(1)
    with pytest.raises(UserError, match="`length` must be in 0..length, which is .20, 20."):
        paged.crop(21)
    with pytest.raises(UserError, match="`group_size` must be none"):
        PagePool(8, dtype=torch.float32, device=CPU, quantization=IntegerQuantization(bits=8, group_size=32))
    with pytest.raises(UserError, match="`granule` must be a power of two from 32 on"):
        PagePool(8, granule=16, dtype=torch.float32, device=CPU, quantization=IntegerQuantization(bits=4))


@pytest.mark.parametrize("quantization", KINDS)
def test_what_was_made_in_inference_mode_is_written_outside_it(quantization):
    with torch.inference_mode():
        paged, ragged = new_stores(quantization)
    for rows in (5, 1):
        coef, ranks = torch.randn(BATCH, rows, WIDTH), torch.full((BATCH, rows), WIDTH)
        paged.append(coef, ranks)
        for b, store in enumerate(ragged):
            store.append(coef[b], ranks[b])
    paged.crop(3)
    for store in ragged:
        store.crop(3)
    check(paged, ragged)
    with torch.inference_mode():
        paged.select(torch.tensor([1, 0]))
    paged.crop(1)
