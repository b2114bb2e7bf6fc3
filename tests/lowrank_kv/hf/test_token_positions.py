"""Which tokens of a sequence are low rank, and whether they follow one another."""

import copy

import pytest
import torch

from lowrank_kv.hf.cache.windowed.positions import TokenPositions
from lowrank_kv.stores.growable_tensor import GrowingTensor

# Of each call its tokens, which of them are padding, and which full-rank tokens are compressed then, by their rows.
TEXTS = {
    "a prompt and tokens behind it": [(9, [], range(2, 7)), (1, [], []), (4, [], range(2, 5)), (3, [], range(2, 4))],
    "padding before it": [(9, [0, 1], range(1, 5)), (5, [], range(1, 4))],
    "padding between": [(9, [], range(1, 9)), (4, [0, 1], []), (3, [], range(1, 4))],
    "a token kept between": [(9, [], range(2, 5)), (3, [], range(3, 6)), (2, [], range(3, 4))],
    "none at first": [(4, [], []), (4, [], range(2, 6)), (2, [], [])],
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_run_is_continued_where_it_goes_on(text):
    positions, compressed = TokenPositions(torch.device("cpu")), []
    for count, padding, rows in TEXTS[text]:
        present_Q = None
        if padding:
            present_Q = torch.ones(count, dtype=torch.bool)
            present_Q[padding] = False
        positions.append(count, present_Q)
        full_F = positions.full_rank.rows
        is_kept_F = torch.ones(len(full_F), dtype=torch.bool)
        is_kept_F[list(rows)] = False
        compressed += full_F[~is_kept_F].tolist()
        positions = positions.with_low_rank(full_F[~is_kept_F].long(), GrowingTensor(full_F[is_kept_F]))
        assert positions.low_rank().tolist() == compressed
        anew = copy.copy(positions)
        anew._find_run()
        low_rank = positions.low_rank_positions()
        assert (
            (low_rank == anew.low_rank_positions()) if isinstance(low_rank, slice) else low_rank.tolist() == compressed
        )
        is_run = compressed and compressed[-1] - compressed[0] == len(compressed) - 1
        assert isinstance(low_rank, slice) == bool(is_run)
