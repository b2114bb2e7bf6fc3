"""Plain form of decode attention on joint coefficients: rebuild everything, then attend, in fp64.

Shapes: B batch, H query heads, G KV heads, Q queries, N low-rank tokens, D head dim.
"""

import torch
from torch import Tensor

from lowrank_kv.ops.full_rank_tokens import FullRankTokens
from lowrank_kv.ops.lowrank_attention.latent_rows import LatentRows
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.softmax_reference import fp64_batch_attention


def joint_attention(
    query_BHQD: Tensor,
    keys: LatentRows,
    values: LatentRows,
    length_B: Tensor,
    scoring: Scoring,
    *,
    rotation: RotaryTable | None = None,
    position_BN: Tensor | None = None,
    mask_BQN: Tensor | None = None,
    full: FullRankTokens | None = None,
) -> Tensor:
    """softmax(q K̂ᵀ · scaling) V̂ with K̂ rotated after it is rebuilt.

    Arguments and result as in :func:`lowrank_kv.ops.lowrank_attention.joint.triton.joint_attention`.
    """
    batch, head_dim = query_BHQD.shape[0], query_BHQD.shape[3]

    def heads(rows: LatentRows) -> Tensor:
        return rows.rebuilt()[:, 0].unflatten(2, (-1, head_dim)).transpose(1, 2)

    key_BGND, room = heads(keys), keys.room
    if rotation is not None:
        row_BN = torch.arange(room, device=query_BHQD.device) if position_BN is None else position_BN[:, :room]
        key_BGND = rotation.rotate(key_BGND, row_BN.expand(batch, -1))
    return fp64_batch_attention(
        query_BHQD,
        key_BGND,
        heads(values),
        length_B,
        scoring,
        mask_BQT=mask_BQN,
        full=full,
    )
