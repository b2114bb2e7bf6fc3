"""A mask that falls along a token's coefficients, from a gate's logits (DynaKV, equations 5, 6 and 8).

Shapes: B batch, T tokens, C joint width.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truncation:
    """How a gate's output becomes a mask: τ, rounding, and whether the hard mask is trained on (straight-through)."""

    threshold: float
    granularity: int
    on_hard_mask: bool


def probabilities(logit_BTC: Tensor) -> Tensor:
    """p of equation 5, in fp32 at least: over 1,000 coefficients a bf16 sum would stand still."""
    return logit_BTC.softmax(dim=-1, dtype=torch.promote_types(logit_BTC.dtype, torch.float32))


def cumulative(logit_BTC: Tensor) -> Tensor:
    """cumsum(p), rising from p₀ to 1."""
    return probabilities(logit_BTC).cumsum(dim=-1)


def entropy(cumulative_BTC: Tensor) -> Tensor:
    """Entropy of p over each token's cutoffs, (B, T), in nats: 0 for a gate that knows, log C for one that does not."""
    probability_BTC = torch.cat([cumulative_BTC[..., :1], cumulative_BTC.diff(dim=-1)], dim=-1)
    return torch.special.entr(probability_BTC).sum(dim=-1)


def soft_mask(cumulative_BTC: Tensor) -> Tensor:
    """m of equation 6 from the gate's output."""
    return cumulative_BTC.flip(-1)
