"""Shared by all decode attention in torch: the softmax, and joining the outputs of a batch.

Shapes: B batch, H query heads, Q queries, T tokens, D head dim.
"""

import torch
from torch import Tensor

from lowrank_kv.ops.scoring import Scoring


def softmax_weights(score_HQT: Tensor, scoring: Scoring, mask_QT: Tensor | None) -> Tensor:
    """fp32 softmax of scaled and capped dot products, with sinks where the model has them.

    Args:
        score_HQT: dot products, of any floating dtype.
        scoring: what the model does to them.
        mask_QT: (Q, T) or (H, Q, T), True where a query may see a token; None when it may see all.

    Returns:
        (H, Q, T); 0 where a query may not see a token, so all 0 for a query that may see none.
    """
    scaling, softcap, sink_H = scoring
    score_HQT = score_HQT.float() * scaling
    if softcap is not None:
        score_HQT = score_HQT.div_(softcap).tanh_().mul_(softcap)
    if mask_QT is None:
        return _softmax(score_HQT, sink_H)
    hidden_QT = ~mask_QT
    # Finite, as −inf would give a query that sees nothing NaN here, which its gradients would keep.
    weight_HQT = _softmax(score_HQT.masked_fill_(hidden_QT, torch.finfo(torch.float32).min), sink_H)
    return weight_HQT.masked_fill(hidden_QT, 0.0)


def _softmax(score_HQT: Tensor, sink_H: Tensor | None) -> Tensor:
    if sink_H is None:
        return score_HQT.softmax(dim=-1)
    sink_HQ1 = sink_H.float()[:, None, None].expand(-1, score_HQT.shape[1], 1)
    return torch.cat([score_HQT, sink_HQ1], dim=-1).softmax(dim=-1)[..., :-1]


def join_sequences(outputs: list[Tensor]) -> Tensor:
    """Attention's (H, Q, D) of each sequence → (B, Q, H, D), contiguous."""
    [first, *others] = outputs
    if not others and first.shape[1] == 1:  # one view, at every token of every layer
        return first.view(1, 1, first.shape[0], first.shape[2])
    return torch.stack(outputs).transpose(1, 2).contiguous()
