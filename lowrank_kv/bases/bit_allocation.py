"""How many bits each coefficient gets: water-filling of a budget of bytes over what the loss asks of coefficients.

Shapes: C coefficients of a row.
"""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lowrank_kv.utils.errors import UserError


class BudgetTooSmallError(UserError):
    """A budget does not hold one coefficient of each row; `needed` bytes would."""

    def __init__(self, message: str, needed: float):
        super().__init__(message)
        self.needed = needed


def allocate_bits(
    importances: Sequence[Tensor],
    distortions: Mapping[int, float],
    budget: float,
    *,
    overhead: int,
    shares: Sequence[float] | None = None,
    rebuild_costs: Sequence[float] | None = None,
) -> list[list[int]]:
    """The widths of every row's coefficients that cost least for their bytes.

    Leaving the coefficient i with distortion ε costs w_i λ_i ε. Bits are given where a bit saves most, over all rows alike.
    That is the optimum where more bits never save more than those before; widths between which they would are not used.

    Args:
        importances: w_i λ_i of each row's coefficients, (C,), falling.
        distortions: bits → ε, the share of a coefficient's energy that rounding takes; 1 for no bits is understood.
        budget: bytes of one row of each kind together, times their shares.
        overhead: bits of a row besides its coefficients'.
        shares: how often each kind of row occurs; None where each does once.
        rebuild_costs: in bits, what keeping a coefficient of each row counts for beyond those it takes, because its work
            costs time; None where it counts for nothing. Rows then keep fewer coefficients of more bits.

    Returns:
        the widths of each row's coefficients, falling; every row keeps at least one coefficient.

    Raises:
        BudgetTooSmallError: the budget does not even hold one coefficient of each row.
    """
    distortions = {0: 1.0, **distortions}
    importance_N = torch.cat([importance_C.double() for importance_C in importances])
    device = importance_N.device
    row_N = torch.cat([torch.full((len(each),), i, device=device) for i, each in enumerate(importances)])
    place_N = torch.cat([torch.arange(len(each), device=device) for each in importances])
    rebuild_costs = rebuild_costs or [0.0] * len(importances)
    # The first coefficient of a row is kept in any case.
    rebuild_cost_N = torch.tensor(rebuild_costs, dtype=torch.float64, device=device)[row_N].where(place_N > 0, 0.0)
    gain, cost, owner, target = [], [], [], []
    for rebuild_cost in dict.fromkeys([0.0, *rebuild_costs]):
        owner_M = (rebuild_cost_N == rebuild_cost).nonzero().squeeze(1)
        for before, after in _worthwhile_steps(distortions, rebuild_cost):
            # So it is given its first bits whatever they save.
            is_least_M = (place_N[owner_M] == 0) & (before == 0)
            saved = -_slope(distortions, before, after, rebuild_cost)
            gain.append(torch.where(is_least_M, torch.inf, importance_N[owner_M] * saved))
            cost.append(torch.full_like(owner_M, after - before))
            owner.append(owner_M)
            target.append(torch.full_like(owner_M, after))
    order = torch.argsort(torch.cat(gain), descending=True, stable=True)
    owner_S, cost_S, target_S = (torch.cat(each)[order] for each in (owner, cost, target))

    share_K = torch.tensor([1.0] * len(importances) if shares is None else shares, dtype=torch.float32, device=device)

    def num_bytes(count: int) -> float:
        bits = torch.zeros(len(importances), dtype=torch.long, device=device)
        bits.index_add_(0, row_N[owner_S[:count]], cost_S[:count])
        return float((((bits + overhead + 7) // 8) * share_K.double()).sum())

    low, high = len(importances), len(owner_S)
    if num_bytes(low) > budget:
        raise BudgetTooSmallError(
            f"a budget of {budget:.0f} bytes for {len(importances)} rows does not hold one coefficient of each; at least "
            f"{num_bytes(low):.0f} are needed",
            num_bytes(low),
        )
    while low < high:  # the most steps that the budget holds
        middle = (low + high + 1) // 2
        low, high = (middle, high) if num_bytes(middle) <= budget else (low, middle - 1)
    width_N = torch.zeros(len(row_N), dtype=torch.long, device=device)
    width_N.scatter_reduce_(0, owner_S[:low], target_S[:low], "amax")
    return [each.tolist() for each in width_N.split([len(each) for each in importances])]


def next_saving(
    importances: Sequence[Tensor], distortions: Mapping[int, float], widths: Sequence[Sequence[int]]
) -> float:
    """What the next bit would save where it saves most: the price of a bit at which these widths are the best ones.

    Args:
        importances, distortions: see :func:`allocate_bits`.
        widths: of each row's coefficients, as it gives them.

    Returns:
        in the units of importances; 0 where no coefficient can have more bits.
    """
    distortions = {0: 1.0, **distortions}
    importance_N = torch.cat([importance_C.double() for importance_C in importances])
    width_N = torch.cat([torch.tensor(row, device=importance_N.device) for row in widths])
    saved = [
        importance_N[width_N == before] * -_slope(distortions, before, after, 0.0)
        for before, after in _worthwhile_steps(distortions, 0.0)
    ]
    return float(torch.cat([*saved, importance_N.new_zeros(1)]).max())


def _worthwhile_steps(distortions: Mapping[int, float], rebuild_cost: float) -> list[tuple[int, int]]:
    """(from, to) of the widths on the lower convex hull of distortion over what they cost."""
    slope = functools.partial(_slope, distortions, rebuild_cost=rebuild_cost)
    hull: list[int] = []
    for bits in sorted(distortions):
        if hull and distortions[bits] >= distortions[hull[-1]]:
            continue
        while len(hull) > 1 and slope(hull[-1], bits) <= slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(bits)
    return list(zip(hull, hull[1:], strict=False))


def _slope(distortions: Mapping[int, float], before: int, after: int, rebuild_cost: float) -> float:
    cost = after - before + (rebuild_cost if before == 0 else 0)
    return (distortions[after] - distortions[before]) / cost
