"""From a gate's distribution to a number of coefficients.

Shapes: B batch, T tokens, C joint width.
"""

import torch
from torch import Tensor


def hard_rank(cumulative_BTC: Tensor, threshold: float, granularity: int) -> Tensor:
    """How many coefficients equation 8 of DynaKV keeps, rounded to the nearest multiple of `granularity`, (B, T) int64.

    The mask m, which is `cumulative_BTC` read backwards, falls along the coefficients, so what exceeds the threshold is a
    prefix, and the gate's rising output can be searched for its end. At least one group is kept: a token must not vanish by
    rounding.
    """
    width = cumulative_BTC.shape[-1]
    threshold_BT1 = torch.full_like(cumulative_BTC[..., :1], threshold)
    rank_BT = width - torch.searchsorted(cumulative_BTC.contiguous(), threshold_BT1, right=True).squeeze(-1)
    return rounded(rank_BT, granularity, width)


def rounded(rank_BT: Tensor, granularity: int, width: int) -> Tensor:
    """Ranks rounded to the nearest multiple of `granularity`, at least one group and at most `width`."""
    if granularity > 1:
        rank_BT = (rank_BT + granularity // 2).div(granularity, rounding_mode="floor") * granularity
    return rank_BT.clamp(min=min(granularity, width), max=width)
