"""Attention with one softmax in fp64, with which every reference ends.

Shapes: B batch, H query heads, G KV heads, Q queries, T compressed tokens, F full-rank tokens, D head dim; X leading
dims, (H) or (B, H).
"""

import torch
from torch import Tensor

from lowrank_kv.ops.full_rank_tokens import FullRankTokens
from lowrank_kv.ops.scoring import Scoring


def fp64_attention(
    query_XQD: Tensor, key_XTD: Tensor, value_XTD: Tensor, scoring: Scoring, mask_XQT: Tensor | None
) -> Tensor:
    """softmax(q Kᵀ · scaling) V, each query head with keys and values of its own.

    Args:
        mask_XQT: True where a query may see a token, broadcast over its leading dims; None when it may see all.

    Returns:
        in the dtype of `query_XQD`; 0 for a query that may see nothing.
    """
    scaling, softcap, sink_H = scoring
    score_XQT = query_XQD.double() @ key_XTD.double().mT * scaling
    if softcap is not None:
        score_XQT = softcap * torch.tanh(score_XQT / softcap)
    if mask_XQT is not None:
        score_XQT = score_XQT.masked_fill(~mask_XQT, -torch.inf)
    if sink_H is not None:
        sink_XQ1 = sink_H.double()[:, None, None].expand(*score_XQT.shape[:-1], 1)
        score_XQT = torch.cat([score_XQT, sink_XQ1], dim=-1)
    weight_XQT = score_XQT.softmax(dim=-1)[..., : key_XTD.shape[-2]]
    if mask_XQT is not None:
        # Not nan_to_num: a NaN among the tokens that are seen must show.
        weight_XQT = weight_XQT.masked_fill(~mask_XQT, 0.0)
    return (weight_XQT @ value_XTD.double()).to(query_XQD.dtype)


def fp64_batch_attention(
    query_BHQD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    length_B: Tensor,
    scoring: Scoring,
    *,
    mask_BQT: Tensor | None,
    full: FullRankTokens | None = None,
) -> Tensor:
    """:func:`fp64_attention` of a batch over rebuilt tokens and over tokens at full rank."""
    queries = query_BHQD.shape[2]
    parts = [(key_BGTD, value_BGTD, length_B, mask_BQT)]
    if full is not None:
        parts.append((full.key_BGFD, full.value_BGFD, full.length_B, full.mask_BQF))
    repeats = query_BHQD.shape[1] // key_BGTD.shape[1]
    keys, values, seen = [], [], []
    for key, value, length, mask in parts:
        keys.append(key.double().repeat_interleave(repeats, dim=1))
        values.append(value.double().repeat_interleave(repeats, dim=1))
        present = (torch.arange(key.shape[2], device=key.device) < length[:, None])[:, None].expand(-1, queries, -1)
        seen.append(present if mask is None else present & mask[:, :, : key.shape[2]])
    return fp64_attention(
        query_BHQD,
        torch.cat(keys, dim=2),
        torch.cat(values, dim=2),
        scoring,
        torch.cat(seen, dim=2)[:, None],
    )
