"""Plain form of decode attention over paged stores: rebuild everything, then attend, in fp64.

Shapes: B batch, H query heads, G KV heads, Q queries, D head dim, C = G·D joint width, T tokens of the longest sequence.
"""

import torch
from torch import Tensor

from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.softmax_reference import fp64_batch_attention
from lowrank_kv.stores.paged import PagedStore


def paged_attention(
    query_BHQD: Tensor,
    keys: PagedStore,
    values: PagedStore,
    decoders: Decoders,
    scoring: Scoring,
    *,
    rotation: RotaryTable | None = None,
    mask_BQT: Tensor | None = None,
) -> Tensor:
    """softmax(q K̂ᵀ · scaling) V̂ with K̂ = rotated(coef_k · decoder_k) and V̂ = coef_v · decoder_v.

    Arguments and result as in :func:`lowrank_kv.ops.paged_attention.triton.paged_attention`.
    """
    batch, head_dim = query_BHQD.shape[0], query_BHQD.shape[3]

    def rebuild(store: PagedStore, decoder_CC: Tensor) -> Tensor:
        return (store.dense().double() @ decoder_CC.double()).unflatten(2, (-1, head_dim)).transpose(1, 2)

    key_BGTD, value_BGTD = rebuild(keys, decoders.key_CC), rebuild(values, decoders.value_CC)
    if rotation is not None:
        position_T = torch.arange(key_BGTD.shape[2], device=query_BHQD.device)
        key_BGTD = rotation.rotate(key_BGTD, position_T.expand(batch, -1))
    return fp64_batch_attention(
        query_BHQD,
        key_BGTD,
        value_BGTD,
        keys.length_B,
        scoring,
        mask_BQT=mask_BQT,
    )
