"""Attention of compiled code in fp32 over rows of plans, which it serves class by class, against the fp64 reference."""

import pytest
import torch
from planned_tokens import planned_tokens
from threads import threads_of

from lowrank_kv.ops import native
from lowrank_kv.ops.lowrank_attention import LowRankTokens, reference
from lowrank_kv.ops.lowrank_attention import native as native_attention
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring

needs_compiler = pytest.mark.skipif(
    native.unsupported_reason(torch.float32, torch.device("cpu"), in_pairs=True) is not None, reason="no C compiler"
)
HEAD_DIM, GROUPS, SHARING = 64, 3, 3
# The bits of each class's coefficients, falling.
PLANS = {
    "every width": [(16,) * 3 + (8,) * 5 + (6,) * 7 + (5,) * 9 + (4,) * 11 + (3,) * 13 + (2,) * 9 + (1,) * 10],
    "one coefficient": [(3,)],
    "rows of less than 16 bytes": [(4,) * 20, (2,) * 30],
    "rows of 16 bytes": [(8,) * 15],
    "whole registers": [(5,) * 16, (4,) * 64],
    "one uncoded, nothing else": [(16,)],
    "uncoded ones before whole registers": [(16,) * 2 + (3,) * 30],
    "four classes": [(2,) * 9, (4,) * 33, (6,) * 3 + (4,) * 40, (16, 8) + (5,) * 70],
}


def tokens_of(plans: list[tuple[int, ...]], count: int, *, queries: int) -> LowRankTokens:
    angle_TF = torch.arange(count)[:, None] * 1e5 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return planned_tokens(
        plans,
        torch.linspace(-0.5, 0.5, len(plans))[1:],
        RotaryTable(angle_TF.cos()[None], angle_TF.sin()[None]),
        count,
        width=max(map(len, plans)),
        groups=GROUPS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        queries=queries,
    )


@needs_compiler
@pytest.mark.parametrize(("queries", "threads"), [(1, 1), (1, 3), (7, 2)])
@pytest.mark.parametrize("count", [1, 23, 100, 2100])  # a part of a block of tokens, and more than are served at once
@pytest.mark.parametrize("name", PLANS)
def test_equals_the_reference(name, count, queries, threads):
    tokens = tokens_of(PLANS[name], count, queries=queries)
    query = torch.randn(GROUPS * SHARING, queries, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    scoring = Scoring(0.2, softcap=None if queries == 1 else 5.0)
    expected = reference.lowrank_attention(query.double(), tokens, scoring)
    with threads_of(threads):
        found = native_attention.lowrank_attention(query, tokens, scoring)
    # Sums of 2,100 weights in fp32 are off by 3e-6 where a row is one coefficient.
    assert float((found.double() - expected).norm() / expected.norm()) < 5e-6
