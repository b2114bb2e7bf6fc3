"""Shared by all decode attention in torch: the softmax, and joining the outputs of a batch.

Shapes: B batch, H query heads, Q queries, T tokens, D head dim.
"""

import torch
from torch import Tensor


def softmax_weights(score_HQT: Tensor, *, scaling: float, softcap: float | None, mask_QT: Tensor | None) -> Tensor:
    """fp32 softmax of scores · scaling, capped to softcap · tanh(s / softcap) (Gemma 2, section 2) before the mask.

    Args:
        score_HQT: any floating dtype.
        mask_QT: (Q, T) or (H, Q, T), True where a query may see a token; None when it may see all.

    Returns:
        (H, Q, T); 0 where a query may not see a token, so all 0 for a query that may see none.
    """
    score_HQT = score_HQT.float() * scaling
    if softcap is not None:
        score_HQT = score_HQT.div_(softcap).tanh_().mul_(softcap)
    if mask_QT is None:
        return score_HQT.softmax(dim=-1)
    hidden_QT = ~mask_QT
    # Finite, as −inf would give a query that sees nothing NaN here, which its gradients would keep.
    weight_HQT = score_HQT.masked_fill_(hidden_QT, torch.finfo(torch.float32).min).softmax(dim=-1)
    return weight_HQT.masked_fill(hidden_QT, 0.0)


def join_sequences(outputs: list[Tensor]) -> Tensor:
    """Attention's (H, Q, D) of each sequence → (B, Q, H, D), contiguous."""
    [first, *others] = outputs
    if not others and first.shape[1] == 1:  # one view, at every token of every layer
        return first.view(1, 1, first.shape[0], first.shape[2])
    return torch.stack(outputs).transpose(1, 2).contiguous()
