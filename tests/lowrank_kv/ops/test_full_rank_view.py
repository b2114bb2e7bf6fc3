"""Tokens at full rank that compiled code appends."""

import copy
import io

import pytest
import torch

from lowrank_kv.ops.native.full_rank_view import append_full_rank
from lowrank_kv.ops.native.library import library
from lowrank_kv.stores.growable_tensor import GrowingTensor

HEADS, HEAD_DIM, LENGTH, ROOM = 3, 8, 5, 4
pytestmark = pytest.mark.skipif(library() is None, reason="there is no C compiler")


def held(dtype: torch.dtype) -> list[GrowingTensor]:
    """Keys, values and positions with room to grow."""
    rows = [GrowingTensor(torch.randn(HEADS, LENGTH, HEAD_DIM).to(dtype), dim=1) for _ in range(2)]
    rows.append(GrowingTensor(torch.arange(LENGTH, dtype=torch.int32) + 2))
    for each in rows:
        each.reserve(LENGTH + ROOM)
    return rows


def states(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """As models leave keys and values: the heads of a token side by side, or its dims among those of others."""
    key_QGD = torch.randn(tokens, HEADS, HEAD_DIM).to(dtype)
    return [key_QGD.transpose(0, 1), torch.randn(HEADS, tokens, 3 * HEAD_DIM).to(dtype)[..., :HEAD_DIM]]


def rows_of(held: list[GrowingTensor]) -> list[torch.Tensor]:
    return [each.rows.clone() for each in held]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, ROOM])
def test_tokens_are_appended_as_they_are(dtype, tokens):
    found, new = held(dtype), states(tokens, dtype)
    expected = [torch.cat([rows, more], 1) for rows, more in zip(rows_of(found), new, strict=False)]
    assert append_full_rank(*found, *new, 40)
    for each, rows in zip(found, expected, strict=False):
        assert torch.equal(each.rows, rows)
    assert found[2].rows.tolist() == [*range(2, LENGTH + 2), *range(40, 40 + tokens)]


@pytest.mark.parametrize("full", range(3))
def test_without_room_nothing_is_written(full):
    found, dtype = held(torch.float32), torch.float32
    found[full].reserve(LENGTH + 1)
    for each in found:
        each.buffer.narrow(each.dim, LENGTH, each.capacity - LENGTH).zero_()
    buffers = [each.buffer.clone() for each in found]
    assert not append_full_rank(*found, *states(2, dtype), 40)
    for each, buffer in zip(found, buffers, strict=True):
        assert each.length == LENGTH
        assert torch.equal(each.buffer, buffer)


def test_buffers_that_have_moved_and_copies_are_found():
    found = held(torch.float32)
    assert append_full_rank(*found, *states(1, torch.float32), 40)
    saved = io.BytesIO()
    torch.save(found[2].native_view, saved)
    saved.seek(0)
    assert torch.load(saved, weights_only=False) is None
    twins = [each.clone() for each in found]
    before = rows_of(found)
    for each in (*found, *twins):
        each.reserve(LENGTH + ROOM + 1)
    assert append_full_rank(*twins, *states(2, torch.float32), 50)
    assert [each.length for each in twins] == [LENGTH + 3] * 3
    assert all(torch.equal(each.rows, rows) for each, rows in zip(found, before, strict=True))
    assert append_full_rank(*copy.deepcopy(found), *states(1, torch.float32), 60)
    assert [each.length for each in found] == [LENGTH + 1] * 3


def test_what_there_is_no_compiled_code_for():
    found, dtype = held(torch.float16), torch.float16
    assert not append_full_rank(*found, *states(1, dtype), 40)
    assert not append_full_rank(*held(torch.float32), *states(1, torch.bfloat16), 40)
    key_GQD, value_GQD = states(1, torch.float32)
    apart_GQD = key_GQD.repeat_interleave(2, dim=2)[:, :, ::2]
    assert torch.equal(apart_GQD, key_GQD)
    assert not append_full_rank(*held(torch.float32), apart_GQD, value_GQD, 40)
