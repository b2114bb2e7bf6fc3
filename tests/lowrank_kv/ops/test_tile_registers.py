"""Pairs of bf16 multiplied in tile registers (AMX), beside vector registers. `test_slow_pairs.py` runs with both."""

import pytest
import torch
from threads import threads_of
from tile_registers import has_tiles, tiles_or_not
from turning_pairs import CLASSES, MODELS, ONE_CLASS, query_of, table_of, tokens_of

from lowrank_kv.ops.lowrank_attention import native as native_attention
from lowrank_kv.ops.scoring import Scoring

needs_tiles = pytest.mark.skipif(not has_tiles(), reason="no tile registers, or the system does not give them")


def in_both(model: str, count: int, form, queries: int) -> list[torch.Tensor]:
    table, query = table_of(model, count + 8), query_of(model, queries)
    tokens = tokens_of(model, count, form, table, queries=queries)
    found = []
    for wanted in (True, False):
        with tiles_or_not(wanted):
            found.append(native_attention.lowrank_attention(query, tokens, Scoring(0.3)).float())
    return found


@needs_tiles
@pytest.mark.parametrize("form", [CLASSES, ONE_CLASS], ids=["four classes", "one class"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("count", "queries"), [(1, 1), (16, 1), (17, 1), (40, 2), (700, 1), (700, 16)])
def test_they_find_what_vectors_find(model, count, queries, form):
    """Sums are in another order: by less than bf16, in which the result is, rounds."""
    tiles, vectors = in_both(model, count, form, queries)
    assert (tiles - vectors).norm() < 2**-8 * vectors.norm()


@needs_tiles
def test_they_are_what_multiplies():
    """So that the tests here tell something: some of 9,216 numbers round to another one of bf16."""
    tiles, vectors = in_both("demo", 2500, CLASSES, 16)
    assert not torch.equal(tiles, vectors)


@needs_tiles
def test_equal_inputs_give_equal_bits():
    with threads_of(3):
        (first, _), (second, _) = (in_both("demo", 2500, CLASSES, 2) for _ in range(2))
    assert torch.equal(first, second)
