"""Soft capping of attention scores (Gemma 2, section 2)."""

from torch import Tensor


def capped(score_HQT: Tensor, softcap: float | None) -> Tensor:
    """softcap · tanh(s / softcap) of scores, in place; unchanged where `softcap` is None."""
    return score_HQT if softcap is None else score_HQT.div_(softcap).tanh_().mul_(softcap)
