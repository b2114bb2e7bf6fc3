"""Codebooks for single numbers: the levels that a few bits can name, chosen for the least squared error.

Shapes: N samples, L levels.
"""

import torch
from torch import Tensor

# Lloyd's iterations stop when no level moves by more than this share of the samples' root mean square, or after so many.
_TOLERANCE, _MOST_ITERATIONS = 1e-5, 500


def lloyd_max(sample_N: Tensor, bits: int) -> Tensor:
    """The levels of a Lloyd–Max quantizer of `bits` bits, (2**bits,) fp32, rising (Lloyd 1957, Max 1960).

    Each level is the mean of the samples nearest to it. They start as dense as the cube root of the samples' density, which
    is the best of many levels (Panter and Dite 1951).

    Args:
        sample_N: any floating dtype, at least one finite number.
        bits: of a code.
    """
    sorted_N = sample_N.double().flatten().sort().values
    sum_N = torch.cat([sorted_N.new_zeros(1), sorted_N.cumsum(0)])
    level_L = _starting_levels(sorted_N, 2**bits)
    tolerance = _TOLERANCE * float(sorted_N.square().mean().sqrt())
    for _ in range(_MOST_ITERATIONS):
        edge_L = torch.searchsorted(sorted_N, (level_L[1:] + level_L[:-1]) / 2)
        first_L = torch.cat([edge_L.new_zeros(1), edge_L])
        last_L = torch.cat([edge_L, edge_L.new_full((1,), len(sorted_N))])
        count_L = last_L - first_L
        # A level that no sample is nearest to stays where it is.
        moved_L = torch.where(count_L > 0, (sum_N[last_L] - sum_N[first_L]) / count_L.clamp(min=1), level_L)
        largest_move = float((moved_L - level_L).abs().max())
        level_L = moved_L
        if largest_move <= tolerance:
            break
    return level_L.float()


def rounded_to(sample_N: Tensor, level_L: Tensor) -> Tensor:
    """Each sample's nearest level."""
    return level_L[torch.bucketize(sample_N.contiguous(), (level_L[1:] + level_L[:-1]) / 2)]


def distortion(sample_N: Tensor, level_L: Tensor) -> float:
    """ε, the share of the samples' energy that rounding to levels takes: E[(x − x̂)²] / E[x²]."""
    error_N = sample_N - rounded_to(sample_N, level_L)
    return float(error_N.square().sum() / sample_N.square().sum())


def _starting_levels(sorted_N: Tensor, count: int) -> Tensor:
    """Quantiles of a distribution whose density is the cube root of the samples'."""
    # Between neighbouring quantiles lies equal mass, so that the density there is the inverse of their distance.
    edges = torch.linspace(0, 1, min(len(sorted_N), 64 * count) + 1, dtype=torch.float64, device=sorted_N.device)
    edge_E = (
        torch.quantile(sorted_N, edges) if len(sorted_N) < 1 << 24 else sorted_N[(edges * (len(sorted_N) - 1)).long()]
    )
    weight_E = (edge_E[1:] - edge_E[:-1]).clamp(min=0) ** (2 / 3)  # density^⅓ · distance
    mass_E = torch.cat([weight_E.new_zeros(1), weight_E.cumsum(0)])
    if not mass_E[-1]:
        return sorted_N[:1].expand(count).clone()
    wanted_L = (torch.arange(count, dtype=torch.float64, device=mass_E.device) + 0.5) / count * mass_E[-1]
    place_L = torch.searchsorted(mass_E, wanted_L).clamp(1, len(mass_E) - 1)
    share_L = (wanted_L - mass_E[place_L - 1]) / (mass_E[place_L] - mass_E[place_L - 1]).clamp(min=1e-300)
    return edge_E[place_L - 1] + share_L * (edge_E[place_L] - edge_E[place_L - 1])
