"""Attention of compiled code in fp32 over rows of plans, which it serves class by class, against the fp64 reference."""

import pytest
import torch
from even_levels import LEVELS
from threads import threads_of

from lowrank_kv.ops import native
from lowrank_kv.ops.lowrank_attention import LowRankTokens, Operands, reference
from lowrank_kv.ops.lowrank_attention import native as native_attention
from lowrank_kv.ops.rotation import RotaryTable, Rotation
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.importance_gate import ImportanceGate
from lowrank_kv.stores.token_plans import TokenPlans
from lowrank_kv.stores.tokenwise import TokenwiseCoefficients

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
    generator, rank = torch.Generator().manual_seed(count), max(map(len, plans))
    gate = ImportanceGate(
        linear_C=torch.randn(rank, generator=generator) / rank**0.5,
        square_C=torch.zeros(rank),
        rest_3=torch.zeros(3),
        leading=rank,
    )
    bounds_K = torch.linspace(-0.5, 0.5, len(plans))[1:]
    shares = (1 / len(plans),) * len(plans)
    token_plans = TokenPlans(
        gate=gate, bounds_K=bounds_K, plans=tuple(BitPlan(bits, LEVELS) for bits in plans), shares=shares
    )

    def operands() -> Operands:
        coef = TokenwiseCoefficients(token_plans, dtype=torch.float32, device=torch.device("cpu"))
        coef.append(torch.randn(1, count, rank, generator=generator))
        basis = torch.randn(1, GROUPS * HEAD_DIM, coef.rank, generator=generator) / coef.rank**0.5
        return Operands(coef, basis, GrowingTensor(torch.randn(GROUPS, 3, HEAD_DIM, generator=generator), dim=1))

    angle_TF = torch.arange(count)[:, None] * 1e5 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    table = RotaryTable(angle_TF.cos()[None], angle_TF.sin()[None])

    def rotate(key_GND: torch.Tensor, positions: slice) -> torch.Tensor:
        cos, sin = (each[0, positions].to(key_GND) for each in (table.cos_BTF, table.sin_BTF))
        first, second = key_GND.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    mask_QT = None if queries == 1 else torch.rand(queries, count + 3, generator=generator) < 0.8
    return LowRankTokens(operands(), operands(), Rotation(rotate, table), slice(0, count), mask_QT)


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
