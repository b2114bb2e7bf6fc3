"""Low-rank tokens whose rows are packed by a plan for each class, for the tests of compiled attention."""

from collections.abc import Sequence

import torch
from even_levels import LEVELS
from rotations import rotation_of

from lowrank_kv.ops.lowrank_attention import LowRankTokens, Operands
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.importance_gate import ImportanceGate
from lowrank_kv.stores.token_plans import TokenPlans
from lowrank_kv.stores.tokenwise import TokenwiseCoefficients


def token_plans_of(
    classes: Sequence[tuple[int, ...]], bounds_K: torch.Tensor, width: int, generator: torch.Generator
) -> TokenPlans:
    """With a gate that looks at a random direction of rows of `width` coefficients."""
    gate = ImportanceGate(
        linear_C=torch.randn(width, generator=generator) / width**0.5,
        square_C=torch.zeros(width),
        rest_3=torch.zeros(3),
        leading=width,
    )
    plans, shares = tuple(BitPlan(bits, LEVELS) for bits in classes), (1 / len(classes),) * len(classes)
    return TokenPlans(gate=gate, bounds_K=bounds_K, plans=plans, shares=shares)


def planned_tokens(
    classes: Sequence[tuple[int, ...]],
    bounds_K: torch.Tensor,
    table: RotaryTable,
    count: int,
    *,
    width: int,
    groups: int,
    head_dim: int,
    dtype: torch.dtype,
    queries: int,
    start: int = 0,
) -> LowRankTokens:
    """`count` tokens at the positions from `start` on, and three at full rank. Several queries see about four fifths.

    Args:
        classes: the bits of each class's coefficients, falling.
        bounds_K: between the classes' scores.
        table: of the rotation.
        width: how many coefficients a row is packed from.
    """
    generator = torch.Generator().manual_seed(count)
    token_plans = token_plans_of(classes, bounds_K, width, generator)

    def operands() -> Operands:
        coef = TokenwiseCoefficients(token_plans, dtype=dtype, device=torch.device("cpu"))
        coef.append(torch.randn(1, count, width, generator=generator))
        basis = torch.randn(1, groups * head_dim, coef.rank, generator=generator) / coef.rank**0.5
        whole = torch.randn(groups, 3, head_dim, generator=generator).to(dtype)
        return Operands(coef, basis.to(dtype), GrowingTensor(whole, dim=1))

    mask_QT = None if queries == 1 else torch.rand(queries, count + 3, generator=generator) < 0.8
    return LowRankTokens(operands(), operands(), rotation_of(table), slice(start, start + count), mask_QT)
