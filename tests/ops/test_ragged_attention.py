"""Decode attention over ragged stores against the plain fp64 form."""

import pytest
import torch

from lowrank.ops.ragged_attention import ragged_attention
from lowrank.ops.ragged_attention.reference import ragged_attention as reference
from lowrank.ragged import RaggedStore

HEADS, GROUPS, HEAD_DIM = 6, 2, 16
WIDTH = GROUPS * HEAD_DIM


def filled_store(tokens: int, generator: torch.Generator, rank: int | None = None) -> RaggedStore:
    store = RaggedStore(WIDTH, dtype=torch.float32, device=torch.device("cpu"))
    ranks = torch.randint(0, WIDTH + 1, (tokens,), generator=generator)
    if rank is not None:
        ranks.fill_(rank)
    # What lies beyond a token's rank must never be read.
    coef = torch.randn(tokens, WIDTH, generator=generator)
    coef[torch.arange(WIDTH) >= ranks[:, None]] = torch.nan
    store.append(coef, ranks)
    return store


def rotation(tokens: int, generator: torch.Generator):
    """A rotation by each token's own angle, as rotary embeddings do."""
    angle = torch.rand(tokens, HEAD_DIM // 2, generator=generator) * 6
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def rotate(key_GND, position_N):
        half = torch.cat([-key_GND[..., HEAD_DIM // 2 :], key_GND[..., : HEAD_DIM // 2]], dim=-1)
        return key_GND * cos[position_N].to(key_GND) + half * sin[position_N].to(key_GND)

    return rotate


@pytest.mark.parametrize("rotated", [True, False], ids=["rebuilt", "absorbed"])
@pytest.mark.parametrize("rank", [None, 0, 1, WIDTH])
@pytest.mark.parametrize(("tokens", "queries"), [(1, 1), (63, 1), (1000, 1), (3000, 3)])
def test_equals_the_reference(tokens, queries, rank, rotated):
    generator = torch.Generator().manual_seed(tokens)
    keys, values = filled_store(tokens, generator, rank), filled_store(tokens, generator, rank)
    query = torch.randn(HEADS, queries, HEAD_DIM, generator=generator)
    key_decoder, value_decoder = torch.randn(2, WIDTH, WIDTH, generator=generator)
    mask = None
    if queries > 1:
        mask = torch.arange(tokens) <= torch.arange(tokens - queries, tokens)[:, None]
    arguments = (query, keys, values, key_decoder, value_decoder)
    options = {"scaling": 0.25, "rotate": rotation(tokens, generator) if rotated else None, "mask_QT": mask}
    actual = ragged_attention(*arguments, **options)
    assert actual.shape == query.shape
    torch.testing.assert_close(actual, reference(*arguments, **options), atol=2e-4, rtol=2e-4)


def test_masked_tokens_have_no_weight():
    generator = torch.Generator().manual_seed(0)
    keys, values = filled_store(40, generator), filled_store(40, generator)
    query = torch.randn(HEADS, 1, HEAD_DIM, generator=generator)
    decoders = torch.randn(2, WIDTH, WIDTH, generator=generator)
    mask = torch.arange(40)[None] >= 15
    hidden = ragged_attention(query, keys, values, *decoders, scaling=0.25, mask_QT=mask)
    without = RaggedStore(WIDTH, dtype=torch.float32, device=torch.device("cpu"))
    without_values = RaggedStore(WIDTH, dtype=torch.float32, device=torch.device("cpu"))
    without.append(keys.dense()[15:], keys.ranks()[15:])
    without_values.append(values.dense()[15:], values.ranks()[15:])
    torch.testing.assert_close(hidden, ragged_attention(query, without, without_values, *decoders, scaling=0.25))
