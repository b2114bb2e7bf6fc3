"""How many coefficients each basis gets when all tokens share one rank.

Shapes: C width.
"""

import torch
from torch import Tensor

from lowrank_kv.utils.errors import UserError


def uniform_ranks(widths: list[int], rate: float, multiple: int = 1) -> list[int]:
    """The same fraction of every width, at least `multiple` coefficients each.

    What a rank had to leave carries over from one basis to the next, so that the total is ``rate · Σ C`` to within
    `multiple`, or more where bases at the end must have more than their share.

    Args:
        widths: C of each basis.
        rate: fraction in (0, 1].
        multiple: ranks are multiples of it, or the whole width.

    Raises:
        UserError: as :func:`waterfill_ranks`.
    """
    _check_rate(rate)
    _check_multiple(widths, rate, multiple)
    ranks, owed = [], 0.0
    for width in widths:
        owed += width * rate
        least = min(multiple, width)
        rank = width if owed >= width - 1e-9 else max(least, int((owed + 1e-9) // multiple) * multiple)
        ranks.append(rank)
        owed -= rank
    return ranks


def waterfill_ranks(energies_C: list[Tensor], rate: float, multiple: int = 1) -> list[int]:
    """Spread a budget of ``rate · Σ C`` coefficients so that the total energy lost is least.

    The largest entries over all spectra are kept: the level at which the budget is spent is common to all
    (water-filling). Spectra must fall, so that what is kept is a prefix; scale each to unit sum where relative energies
    are to be compared. The budget is met to within half a `multiple`, or what is least where that is more.

    Args:
        energies_C: the spectra.
        rate: fraction in (0, 1].
        multiple: ranks are multiples of it, or the whole width: so many coefficients are kept or left together.

    Raises:
        UserError: `rate` is not in its range, or `multiple` coefficients for every basis are more than the budget.
    """
    _check_rate(rate)
    widths = [len(energy_C) for energy_C in energies_C]
    _check_multiple(widths, rate, multiple)
    share, size, owner, first = [], [], [], []
    device = energies_C[0].device
    for i, (energy_C, width) in enumerate(zip(energies_C, widths, strict=True)):
        runs = -(-width // multiple)
        size_K = torch.full((runs,), multiple, device=device)
        size_K[-1] = width - (runs - 1) * multiple
        padded = torch.nn.functional.pad(energy_C.double(), (0, runs * multiple - width))
        # Rounding must not let the mean of equal energies rise at a last run, which may be shorter.
        share.append((padded.view(runs, multiple).sum(dim=1) / size_K).cummin(0).values)
        size.append(size_K)
        owner.append(torch.full((runs,), i, device=device))
        first.append(torch.arange(runs, device=device) == 0)
    share, size, owner, first = (torch.cat(each) for each in (share, size, owner, first))
    # The first coefficients of each are given first, so that no layer is left without any. Stable: of runs that are worth
    # the same, such as those without energy, the earlier come first.
    order = torch.argsort(share.masked_fill(first, torch.inf), descending=True, stable=True)
    is_within = size[order].cumsum(0) <= round(rate * sum(widths)) + multiple // 2
    chosen = order[is_within | first[order]]
    nothing = torch.zeros(len(widths), dtype=torch.long, device=device)
    return nothing.index_add_(0, owner[chosen], size[chosen]).tolist()


def falling_means(worth_C: Tensor) -> Tensor:
    """The worths of coefficients that can be kept only with all before them, as ones that fall, in fp64.

    Runs of coefficients that are worth less than what follows them get the mean of both (pool adjacent violators): the sum
    over a prefix that ends with a run stays, and water-filling on the result takes the prefixes worth most.
    """
    runs: list[tuple[float, int]] = []  # (mean, length)
    for worth in worth_C.double().tolist():
        length = 1
        while runs and runs[-1][0] <= worth:
            mean, before = runs.pop()
            worth, length = (mean * before + worth * length) / (before + length), before + length
        runs.append((worth, length))
    return torch.cat([torch.full((length,), mean, dtype=torch.float64, device="cpu") for mean, length in runs])


def energy_rank(energy_C: Tensor, threshold: float) -> int:
    """The least rank whose leading energies hold the fraction `threshold` of the total, in (0, 1]."""
    if not 0 < threshold <= 1:
        raise UserError(f"`threshold` must be in (0, 1], got {threshold}; 0.95 keeps 95 % of the energy")
    share_C = energy_C.double().cumsum(0) / energy_C.double().sum()
    return min(int((share_C < threshold - 1e-12).sum()) + 1, len(energy_C))


def energy_curve(energy_C: Tensor, points: int) -> list[float]:
    """The share of the total that the C/points, 2C/points, … C leading energies hold; at most C points, the last is 1."""
    share_C = energy_C.double().cumsum(0) / energy_C.double().sum().clamp(min=1e-30)
    width, points = len(energy_C), min(points, len(energy_C))
    return [float(share_C[round(width * (i + 1) / points) - 1]) for i in range(points)]


def check_rank(rank: int, width: int, name: str = "rank") -> None:
    """Raise :class:`UserError` unless 1 ≤ rank ≤ width."""
    if not 1 <= rank <= width:
        raise UserError(f"`{name}` must be in 1..{width} for this model, got {rank}; there are {width} coefficients")


def _check_rate(rate: float) -> None:
    if not 0 < rate <= 1:
        raise UserError(f"`rate` must be in (0, 1], got {rate}; 0.3 keeps 30 % of the coefficients")


def _check_multiple(widths: list[int], rate: float, multiple: int) -> None:
    least, budget = sum(min(multiple, width) for width in widths), rate * sum(widths)
    if multiple > 1 and least > budget + multiple:
        raise UserError(
            f"ranks in multiples of {multiple} keep at least {least / sum(widths):.2f} of widths like {widths[0]}, "
            f"more than the rate {rate}; take a smaller multiple or a higher rate"
        )
