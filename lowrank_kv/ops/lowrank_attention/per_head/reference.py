"""Plain form of decode attention on per-head coefficients: rebuild everything, then attend, in fp64.

Shapes: B batch, H query heads, G KV heads, Q queries, N low-rank tokens, D head dim.
"""

from torch import Tensor

from lowrank_kv.ops.full_rank_tokens import FullRankTokens
from lowrank_kv.ops.lowrank_attention.latent_rows import LatentRows
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.softmax_reference import fp64_batch_attention


def latent_attention(
    query_BHQD: Tensor,
    keys: LatentRows,
    values: LatentRows,
    length_B: Tensor,
    scoring: Scoring,
    *,
    mask_BQN: Tensor | None = None,
    full: FullRankTokens | None = None,
) -> Tensor:
    """softmax(q K̂ᵀ · scaling) V̂.

    Arguments and result as in :func:`lowrank_kv.ops.lowrank_attention.per_head.triton.latent_attention`.
    """
    return fp64_batch_attention(
        query_BHQD,
        keys.rebuilt(),
        values.rebuilt(),
        length_B,
        scoring,
        mask_BQT=mask_BQN,
        full=full,
    )
