"""From a gate's distribution to a number of coefficients.

Shapes: B batch, T tokens, C joint width.
"""

from torch import Tensor


def hard_rank(cumulative_BTC: Tensor, threshold: float, granularity: int) -> Tensor:
    """How many coefficients equation 8 of DynaKV keeps, rounded to the nearest multiple of `granularity`, (B, T) int64.

    The mask m, which is `cumulative_BTC` read backwards, falls along the coefficients, so what exceeds the threshold is a
    prefix, and counting it needs no flip. At least one group is kept: a token must not vanish by rounding.
    """
    width = cumulative_BTC.shape[-1]
    rank_BT = (cumulative_BTC > threshold).sum(dim=-1)
    if granularity > 1:
        rank_BT = (rank_BT + granularity // 2).div(granularity, rounding_mode="floor") * granularity
    return rank_BT.clamp(min=min(granularity, width), max=width)
