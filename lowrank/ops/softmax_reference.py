"""The plain end of every batched reference: one softmax over what was rebuilt and what is at full rank, in fp64.

Shapes: B batch, H query heads, G KV heads, Q queries, T compressed tokens, F full-rank tokens, D head dim.
"""

import torch
from torch import Tensor

from lowrank.ops.full_tokens import FullTokens


def joined_attention(
    query_BHQD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    length_B: Tensor,
    *,
    scaling: float,
    softcap: float | None,
    mask_BQT: Tensor | None,
    full: FullTokens | None,
) -> Tensor:
    """softmax(q Kᵀ · scaling) V in the dtype of `query_BHQD`; 0 for a query that may see nothing."""
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
    score_BHQT = query_BHQD.double() @ torch.cat(keys, dim=2).mT * scaling
    if softcap is not None:
        score_BHQT = softcap * torch.tanh(score_BHQT / softcap)
    score_BHQT = score_BHQT.masked_fill(~torch.cat(seen, dim=2)[:, None], -torch.inf)
    weight_BHQT = score_BHQT.softmax(dim=-1).nan_to_num(0.0)
    return (weight_BHQT @ torch.cat(values, dim=2)).to(query_BHQD.dtype)
