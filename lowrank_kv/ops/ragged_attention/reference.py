"""Reference of decode attention over a ragged cache: rebuild everything, then attend.

Shapes: B batch, H query heads, G KV heads, Q new queries, D head dim, C = G·D joint width, T cached tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.ragged_attention.tokens import RaggedTokens, one_by_one
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.softmax_reference import fp64_attention
from lowrank_kv.stores.ragged import RaggedStore


def ragged_attention(
    query_BHQD: Tensor, sequences: Sequence[RaggedTokens], decoders: Decoders, scoring: Scoring
) -> Tensor:
    """softmax(q K̂ᵀ · scaling) V̂ with K̂ = rotated(coef_k · decoder_k) and V̂ = coef_v · decoder_v, in fp64.

    Arguments and result as in :func:`lowrank_kv.ops.ragged_attention.ragged_attention`.
    """
    return one_by_one(_attention_of_one, query_BHQD, sequences, decoders, scoring)


def _attention_of_one(query_HQD: Tensor, tokens: RaggedTokens, decoders: Decoders, scoring: Scoring) -> Tensor:
    keys, values, rotation, position_T, mask_QT = tokens
    heads, _, head_dim = query_HQD.shape
    width = decoders.key_CC.shape[1]
    groups = width // head_dim

    def rebuild(store: RaggedStore, decoder_CC: Tensor) -> Tensor:
        return (store.dense().double() @ decoder_CC.double()).view(store.length, groups, head_dim).transpose(0, 1)

    key_GTD, value_GTD = rebuild(keys, decoders.key_CC), rebuild(values, decoders.value_CC)
    if rotation is not None:
        position_T = torch.arange(keys.length, device=query_HQD.device) if position_T is None else position_T
        key_GTD = rotation.rotate(key_GTD, position_T).double()
    key_HTD = key_GTD.repeat_interleave(heads // groups, dim=0)
    value_HTD = value_GTD.repeat_interleave(heads // groups, dim=0)
    return fp64_attention(query_HQD, key_HTD, value_HTD, scoring, mask_QT)
