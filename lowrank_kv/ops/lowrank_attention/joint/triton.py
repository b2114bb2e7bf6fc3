"""Decode attention on joint coefficients taken before rotation, all tokens of a sequence at one rank, in Triton.

Two passes, since the sums of values over all dims do not fit beside a rebuilt key: the first rebuilds keys, rotates them and
writes scores, the second multiplies values' coefficients with their softmax. Values are never rebuilt, keys only within the
first.

Shapes: B batch, H query heads, G KV heads, Q queries, M = H/G · Q rows that share a KV head, P = G·M, D head dim, C = G·D,
N low-rank tokens, F full-rank tokens, R rank, X parts of the softmax.
"""

from torch import Tensor

from lowrank_kv.ops.full_rank_tokens import FullRankTokens
from lowrank_kv.ops.lowrank_attention.joint.triton_scores import joint_scores
from lowrank_kv.ops.lowrank_attention.joint.triton_values import block_of, weighted_rows
from lowrank_kv.ops.lowrank_attention.latent_rows import LatentRows
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.triton.launch import block
from lowrank_kv.ops.triton.split_softmax import SplitSoftmax, token_splits
from lowrank_kv.utils.config import require


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
    splits: int | None = None,
) -> Tensor:
    """Attention of Q queries of each sequence over its low-rank and full-rank tokens, in one softmax.

    Nothing in it waits for the device, so that a CUDA graph can hold it once the kernels have been tuned by a first call.

    Args:
        query_BHQD: rotated queries, fp32, fp16 or bf16.
        keys, values: coefficients of the same tokens, of one part of width C; keys were compressed before rotation.
        length_B: low-rank tokens of each sequence, int32, at most the room N.
        scoring: what the model does to scores.
        rotation: of rebuilt keys; None for a family without one.
        position_BN: int32 rows of the rotary table for the tokens; None for row n. 1 may stand for B.
        mask_BQN: bool, True where a query may see a low-rank token; None when it may see all. 1 may stand for B.
        full: tokens at full rank; None where there are none.
        splits: parts the sequence is cut into; None lets the device's size decide.

    Returns:
        (B, H, Q, D) in the dtype of `query_BHQD`; 0 for a query that may see nothing. Scores and softmax are in fp32.

    Raises:
        UserError: D is odd: its dims are read in two halves.
    """
    batch, _, queries, head_dim = query_BHQD.shape
    require(head_dim % 2 == 0, "query_BHQD", tuple(query_BHQD.shape), "of an even head dim")
    groups = keys.basis_BGDR.shape[2] // head_dim
    columns = -(-values.numbers // block_of(values))
    low = splits or token_splits(keys.room, batch * columns, query_BHQD.device)
    softmax = SplitSoftmax(query_BHQD, groups, scoring, low=low, full=full, splits=splits)
    score_BNP = joint_scores(
        softmax.query_BGMD,
        keys,
        length_B,
        queries=queries,
        scaling=scoring.scaling,
        rotation=rotation,
        position_BN=position_BN,
        softcap=scoring.softcap,
        mask_BQN=mask_BQN,
    )
    partial_BPSR = weighted_rows(
        score_BNP, values, length_B, softmax.max_BPXV, softmax.sum_BPX, splits=low, dtype=query_BHQD.dtype
    )
    value_decoder_BGRD = values.basis_BGDR[:, 0].unflatten(1, (groups, head_dim)).mT
    return softmax.attended(partial_BPSR, value_decoder_BGRD, block_width=min(128, block(values.rank)))
