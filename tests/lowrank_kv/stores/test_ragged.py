"""The ragged store against a plain list of rows."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_kv.ops.native.ragged_view import append_few
from lowrank_kv.stores.growable_tensor import GROWTH
from lowrank_kv.stores.ragged import RaggedStore, position_nbytes

WIDTH = 24


def new_store() -> RaggedStore:
    return RaggedStore(WIDTH, dtype=torch.float32, device=torch.device("cpu"))


def check_against(store: RaggedStore, rows: list[torch.Tensor]) -> None:
    dense = torch.zeros(len(rows), WIDTH)
    for i, row in enumerate(rows):
        dense[i, : len(row)] = row
    assert store.length == len(rows)
    assert torch.equal(store.dense(), dense)
    assert store.ranks().tolist() == [len(row) for row in rows]
    order = store.order()
    assert sorted(order.tolist()) == list(range(len(rows)))
    stored = [row for bucket in store.buckets() for row in bucket.rows()]
    assert all(torch.equal(row, rows[place]) for row, place in zip(stored, order.tolist(), strict=True))
    assert store.nbytes == sum(tensor.untyped_storage().nbytes() for _, tensor in store.tensors_by_kind())


operations = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["append", "append few"]), st.lists(st.integers(0, WIDTH), min_size=1, max_size=9)),
        st.tuples(st.just("crop"), st.integers(0, 12)),
        st.tuples(st.just("keep every"), st.integers(1, 3)),
        st.tuples(st.sampled_from(["clone", "pickle", "check"]), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(operations)
def test_any_sequence_of_operations_matches_a_list(steps):
    store, rows = new_store(), []
    generator = torch.Generator().manual_seed(0)
    for name, argument in steps:
        if name.startswith("append"):
            coef = torch.randn(len(argument), WIDTH, generator=generator)
            if name == "append":
                store.append(coef, torch.tensor(argument))
            else:
                append_few(store, coef, argument)
            rows += [coef[i, :rank].clone() for i, rank in enumerate(argument)]
        elif name == "crop":
            length = max(0, len(rows) - argument)
            store.crop(length)
            rows = rows[:length]
        elif name == "keep every":
            store = store.kept(torch.arange(0, len(rows), argument))
            rows = rows[::argument]
        elif name == "clone":
            store = store.clone()
        elif name == "pickle":
            store = pickle.loads(pickle.dumps(store))
        else:  # seldom: nobody looks at what compiled code appends for many tokens
            check_against(store, rows)
    check_against(store, rows)


def test_a_prompt_has_room_for_a_few_tokens():
    store = new_store()
    store.append(torch.randn(640, WIDTH), torch.tensor([4, 8]).repeat(320), is_prompt=True)
    used = 320 * (4 + 8) * 4 + 640 * 2
    assert used < store.nbytes <= used * 65 / 64
    before = [tensor.data_ptr() for _, tensor in store.tensors_by_kind()]
    append_few(store, torch.randn(10, WIDTH), [4, 8] * 5)
    assert [tensor.data_ptr() for _, tensor in store.tensors_by_kind()] == before
    append_few(store, torch.randn(1, WIDTH), [4])
    assert [tensor.data_ptr() for _, tensor in store.tensors_by_kind()] != before


def test_a_short_prompt_is_stored_without_slack():
    ranks = torch.randint(1, WIDTH + 1, (500,), generator=torch.Generator().manual_seed(0))
    store = new_store()
    store.append(torch.randn(500, WIDTH), ranks, is_prompt=True)
    assert store.nbytes == int(ranks.sum()) * 4 + 500 * 2


def test_growth_is_amortized_and_bounded():
    store, copies = new_store(), 0
    for _ in range(3000):
        before = [tensor.data_ptr() for _, tensor in store.tensors_by_kind()]
        append_few(store, torch.randn(1, WIDTH), [8])
        copies += before != [tensor.data_ptr() for _, tensor in store.tensors_by_kind()]
    row = 8 * 4 + 2
    assert copies < 100
    assert store.nbytes <= 3000 * row * (1 + 1 / 64) + 33 * row, "a long bucket has little room"


def test_a_short_bucket_grows_by_an_eighth():
    store = new_store()
    for count in range(1, 200):
        append_few(store, torch.randn(1, WIDTH), [8])
        assert store.nbytes <= count * (8 * 4 + 2) * (1 + GROWTH) + 64


def test_the_index_widens_past_int16():
    length = torch.iinfo(torch.int16).max
    store = new_store()
    store.append(torch.ones(length, WIDTH), torch.full((length,), 2))
    assert store.index_dtype.itemsize == position_nbytes(length) == 2
    append_few(store, torch.full((2, WIDTH), 3.0), [2, 5])
    assert store.index_dtype.itemsize == position_nbytes(length + 2) == position_nbytes(length + 1) == 4
    assert store.dense()[length - 1 :, 0].tolist() == [1.0, 3.0, 3.0]
    assert store.ranks()[-1] == 5


def test_crop_refuses_lengths_it_does_not_have():
    with pytest.raises(ValueError, match="0..0, got 3"):
        new_store().crop(3)
