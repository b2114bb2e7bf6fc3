"""Decode attention over paged stores whose tokens keep different numbers of joint coefficients, in Triton.

Two passes, because a token's key and value have different ranks and so lie in tiles with different neighbours: the first
writes scores by position (128 bytes a token with 32 heads, against 4,096 of a full cache of 8 KV heads of 128), the second
multiplies values with their softmax. Values are never rebuilt, keys only within the first.

Shapes: B batch, H query heads, G KV heads, Q queries, M = H/G · Q rows that share a KV head, P = G·M, D head dim, C = G·D
joint width, T capacity, K granules of the width, X parts of the softmax.
"""

from torch import Tensor

from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.paged_attention.triton_scores import paged_scores
from lowrank_kv.ops.paged_attention.triton_values import value_splits, weighted_latents
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.triton.split_softmax import SplitSoftmax
from lowrank_kv.stores.paged import PagedStore
from lowrank_kv.utils.config import require


def paged_attention(
    query_BHQD: Tensor,
    keys: PagedStore,
    values: PagedStore,
    decoders: Decoders,
    scoring: Scoring,
    *,
    rotation: RotaryTable | None = None,
    mask_BQT: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention of Q queries of each sequence over its cached tokens (DynaKV section 3.2, equation 3).

    Nothing in it waits for the device, so that a CUDA graph can hold it once the kernels have been tuned by a first call.

    Args:
        query_BHQD: rotated queries, fp32, fp16 or bf16.
        keys, values: stores of the same tokens and capacity; their ranks need not agree.
        decoders: of keys and values, in the queries' dtype.
        scoring: what the model does to scores.
        rotation: of rebuilt keys; None for a family without one, or keys compressed after it.
        mask_BQT: bool, True where a query may see a row's token; None when it may see all. 1 may stand for B.
        splits: parts the values' tiles are cut into; None lets the device's size decide.

    Returns:
        (B, H, Q, D) in the dtype of `query_BHQD`; 0 for a query that may see nothing. Scores and softmax are in fp32.

    Raises:
        UserError: the stores differ in capacity, or D is odd.
    """
    require(values.capacity == keys.capacity, "values", values.capacity, f"of the keys' capacity, {keys.capacity} rows")
    queries, head_dim = query_BHQD.shape[2:]
    require(
        head_dim % 2 == 0, "query_BHQD", tuple(query_BHQD.shape), "of an even head dim: keys are rotated in two halves"
    )
    groups, granules = keys.width // head_dim, values.granules
    low = splits or value_splits(values, query_BHQD.device)
    softmax = SplitSoftmax(query_BHQD, groups, scoring, low=low, maxima=granules)
    score_BTP = paged_scores(
        softmax.query_BGMD,
        keys,
        decoders.key_CC,
        queries=queries,
        scaling=scoring.scaling,
        rotation=rotation,
        softcap=scoring.softcap,
        mask_BQT=mask_BQT,
    )
    partial_BPSC = weighted_latents(
        score_BTP, values, softmax.max_BPXV, softmax.sum_BPX, splits=low, dtype=query_BHQD.dtype
    )
    value_decoder_GCD = decoders.value_CC.view(-1, groups, head_dim).transpose(0, 1)
    return softmax.attended(partial_BPSC, value_decoder_GCD, block_width=values.pool.granule)
