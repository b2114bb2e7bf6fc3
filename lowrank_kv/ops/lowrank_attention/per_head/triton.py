"""Decode attention on per-head coefficients taken after rotation (OjaKV, section 3.2), in Triton.

Neither keys nor values are rebuilt: q · (U c) = (Uᵀq) · c, and Σ w (U c) = U Σ w c. A step reads each coefficient once.

Shapes: B batch, H query heads, G KV heads, Q queries, M = H/G · Q rows that share a KV head, D head dim, N low-rank tokens,
F full-rank tokens, R rank, X parts of the softmax.
"""

from torch import Tensor

from lowrank_kv.ops.full_rank_tokens import FullRankTokens
from lowrank_kv.ops.lowrank_attention.latent_rows import LatentRows
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.triton.launch import block
from lowrank_kv.ops.triton.split_attention import attend_split
from lowrank_kv.ops.triton.split_softmax import SplitSoftmax, token_splits


def latent_attention(
    query_BHQD: Tensor,
    keys: LatentRows,
    values: LatentRows,
    length_B: Tensor,
    scoring: Scoring,
    *,
    mask_BQN: Tensor | None = None,
    full: FullRankTokens | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention of Q queries of each sequence over its low-rank and full-rank tokens, in one softmax.

    Nothing in it waits for the device, so that a CUDA graph can hold it once the kernels have been tuned by a first call.

    Args:
        query_BHQD: rotated queries, fp32, fp16 or bf16.
        keys, values: coefficients of the same tokens; keys were compressed after rotation.
        length_B: low-rank tokens of each sequence, int32, at most the room N.
        scoring: what the model does to scores.
        mask_BQN: bool, True where a query may see a low-rank token; None when it may see all. 1 may stand for B.
        full: tokens at full rank; None where there are none.
        splits: parts the sequence is cut into; None lets the device's size decide.

    Returns:
        (B, H, Q, D) in the dtype of `query_BHQD`; 0 for a query that may see nothing. Scores and softmax are in fp32.
    """
    batch, _, queries, _ = query_BHQD.shape
    _, groups, room, _ = keys.row_BGNY.shape
    low = splits or token_splits(room, batch * groups, query_BHQD.device)
    softmax = SplitSoftmax(query_BHQD, groups, scoring, low=low, full=full, splits=splits)
    partial_BPSR = attend_split(
        (softmax.query_BGMD @ keys.basis_BGDR).contiguous(),
        keys.row_BGNY,
        values.row_BGNY,
        length_B,
        softmax.max_BPXV,
        softmax.sum_BPX,
        first=0,
        splits=low,
        queries=queries,
        scaling=scoring.scaling,
        softcap=scoring.softcap,
        mask_BQN=mask_BQN,
        value_width=values.rank,
        key_scale_BGN2=keys.scale_BGN2,
        value_scale_BGN2=values.scale_BGN2,
        key_bits=keys.bits,
        value_bits=values.bits,
    )
    return softmax.attended(partial_BPSR, values.basis_BGDR.mT, block_width=block(values.rank))
