"""Reference of decode attention over low-rank and full-rank tokens: rebuild everything, then attend, in fp64.

Shapes: H query heads, D head dim, N low-rank tokens, T all tokens.
"""

import torch
from torch import Tensor

from lowrank_kv.ops.lowrank_attention.tokens import LowRankTokens, Operands
from lowrank_kv.ops.rotation import positions_of_part
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.softmax_reference import fp64_attention


def lowrank_attention(query_HQD: Tensor, tokens: LowRankTokens, scoring: Scoring) -> Tensor:
    """softmax(q K̂ᵀ · scaling) V̂, with K̂ and V̂ the low-rank tokens rebuilt and the full-rank ones after them.

    Arguments and result as in :func:`lowrank_kv.ops.lowrank_attention.lowrank_attention`.
    """
    keys, values, rotation, positions, mask_QT = tokens

    def rebuild(operands: Operands) -> Tensor:
        groups, _, head_dim = operands.full_GFD.shape
        joint = operands.basis_PWR.shape[0] == 1
        per_part = [c.double() @ u.double().T for c, u in zip(operands.coef.rows(), operands.basis_PWR, strict=True)]
        return torch.stack(per_part[0].split(head_dim, dim=1)) if joint else torch.stack(per_part)

    low_key = rebuild(keys)
    if rotation is not None:
        parts = [
            rotation.rotate(key_ND[None], positions_of_part(positions, part)) for part, key_ND in enumerate(low_key)
        ]
        low_key = torch.cat(parts).double()
    repeats = query_HQD.shape[0] // low_key.shape[0]
    key_HTD = torch.cat([low_key, keys.full_GFD.double()], dim=1).repeat_interleave(repeats, dim=0)
    value_HTD = torch.cat([rebuild(values), values.full_GFD.double()], dim=1).repeat_interleave(repeats, dim=0)
    return fp64_attention(query_HQD, key_HTD, value_HTD, scoring, mask_QT)
