"""Decode attention on joint coefficients taken before rotation, all tokens of a sequence at one rank, in Triton.

Two passes, since the sums of values over all dims do not fit beside a rebuilt key: the first rebuilds keys, turns them and
writes scores, the second multiplies values' coefficients with their softmax. Values are never rebuilt, keys only within the
first.

Shapes: B batch, H query heads, G KV heads, Q queries, M = H/G · Q rows that share a KV head, P = G·M, D head dim, C = G·D,
N low-rank tokens, F full-rank tokens, R rank, X parts of the softmax.
"""

import torch
from torch import Tensor

from lowrank.config import require
from lowrank.ops.full_tokens import FullTokens
from lowrank.ops.joint_attention.triton_scores import joint_scores
from lowrank.ops.joint_attention.triton_values import block_of, weighted_rows
from lowrank.ops.latent_attention.operands import LatentRows
from lowrank.ops.rotary_table import RotaryTable
from lowrank.ops.triton_launch import block, splits_of
from lowrank.ops.triton_merge import attended
from lowrank.ops.triton_split import attend_full

# The fewest tokens worth a split.
_TOKENS_PER_SPLIT = 256


def joint_attention(
    query_BHQD: Tensor,
    keys: LatentRows,
    values: LatentRows,
    length_B: Tensor,
    *,
    scaling: float,
    rotation: RotaryTable | None = None,
    place_BN: Tensor | None = None,
    softcap: float | None = None,
    mask_BQN: Tensor | None = None,
    full: FullTokens | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention of Q queries of each sequence over its low-rank and full-rank tokens, in one softmax.

    Nothing in it waits for the device, so that a CUDA graph can hold it once the kernels have been tuned by a first call.

    Args:
        query_BHQD: rotated queries, fp32, fp16 or bf16.
        keys, values: coefficients of the same tokens, of one part of width C; keys were compressed before rotation.
        length_B: low-rank tokens of each sequence, int32, at most the room N.
        scaling: the model's own score scale, usually 1/√D.
        rotation: of rebuilt keys; None for a family without one.
        place_BN: int32 rows of the rotary table for the tokens; None for row n. 1 may stand for B.
        softcap: scores s become softcap · tanh(s / softcap) before the mask (Gemma 2, section 2); None leaves them.
        mask_BQN: bool, True where a query may see a low-rank token; None when it may see all. 1 may stand for B.
        full: tokens at full rank; None where there are none.
        splits: parts the sequence is cut into; None lets the device's size decide.

    Returns:
        (B, H, Q, D) in the dtype of `query_BHQD`; 0 for a query that may see nothing. Scores and softmax are in fp32.

    Raises:
        UserError: D is odd: its dims are read in two halves.
    """
    batch, heads, queries, head_dim = query_BHQD.shape
    require(head_dim % 2 == 0, "query_BHQD", tuple(query_BHQD.shape), "of an even head dim")
    groups, room = keys.basis_BGDR.shape[2] // head_dim, keys.row_BGNY.shape[2]
    query_BGMD = query_BHQD.reshape(batch, groups, -1, head_dim).contiguous()
    rows, dtype, device = heads * queries, query_BHQD.dtype, query_BHQD.device
    score_BNP = joint_scores(
        query_BGMD,
        keys,
        length_B,
        queries=queries,
        scaling=scaling,
        rotation=rotation,
        place_BN=place_BN,
        softcap=softcap,
        mask_BQN=mask_BQN,
    )

    def cut(tokens: int, beside: int) -> int:
        return splits or splits_of(-(-tokens // _TOKENS_PER_SPLIT), batch * beside, device)

    columns = -(-values.row_BGNY.shape[3] // block_of(values))
    low, whole = cut(room, columns), 0 if full is None else cut(full.key_BGFD.shape[2], groups)
    max_BPX1 = torch.empty(batch, rows, low + whole, 1, dtype=torch.float32, device=device)
    sum_BPX = torch.empty(batch, rows, low + whole, dtype=torch.float32, device=device)
    partial = weighted_rows(score_BNP, values, length_B, max_BPX1, sum_BPX, splits=low, dtype=dtype)
    partial_full = None
    if full is not None:
        partial_full = attend_full(
            query_BGMD,
            full,
            max_BPX1,
            sum_BPX,
            first=low,
            splits=whole,
            queries=queries,
            scaling=scaling,
            softcap=softcap,
        )
    value_decoder_BGRD = values.basis_BGDR[:, 0].unflatten(1, (groups, head_dim)).mT
    out_BGMD = attended(
        partial,
        partial_full,
        max_BPX1,
        sum_BPX,
        value_decoder_BGRD,
        dtype=dtype,
        block_width=min(128, block(values.rank)),
    )
    return out_BGMD.view(batch, heads, queries, head_dim)
