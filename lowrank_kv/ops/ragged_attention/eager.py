"""Decode attention over a ragged cache in plain torch, one dense matrix product per rank.

Attention does not depend on the order of tokens, so each bucket of equal rank is multiplied as it is stored. Keys that were
compressed before rotation are rebuilt tile by tile. Values are never rebuilt: out = (softmax · coef_v) · decoder_v, and the
bracket is one (C,) vector per query for any number of tokens. Keys that were compressed after rotation are not rebuilt
either: q · (coef_k · decoder_k)ᵀ = (q · decoder_kᵀ) · coef_kᵀ.

Shapes: B batch, H query heads, G KV heads, J = H/G queries per KV head, Q new queries, D head dim, C = G·D joint width,
T cached tokens, N tokens of a bucket or tile, R rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.ragged_attention.tokens import RaggedTokens, one_by_one
from lowrank_kv.ops.rebuild_scores import at_least_fp32, rebuild_scores
from lowrank_kv.ops.rotation import Rotation
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.softmax import softmax_weights
from lowrank_kv.stores.ragged import RaggedStore


def ragged_attention(
    query_BHQD: Tensor, sequences: Sequence[RaggedTokens], decoders: Decoders, scoring: Scoring
) -> Tensor:
    """See :func:`lowrank_kv.ops.ragged_attention.ragged_attention`."""
    return one_by_one(_attention_of_one, query_BHQD, sequences, decoders, scoring)


def _attention_of_one(query_HQD: Tensor, tokens: RaggedTokens, decoders: Decoders, scoring: Scoring) -> Tensor:
    keys, values, rotation, position_T, mask_QT = tokens
    heads, queries, head_dim = query_HQD.shape
    groups = decoders.key_CC.shape[1] // head_dim
    query_GMD = query_HQD.reshape(groups, -1, head_dim)  # M = J·Q rows share a KV head
    if rotation is None:
        score_GMT = _scores_absorbed(query_GMD, keys, decoders.key_CC)
    else:
        score_GMT = _scores_rebuilt(query_GMD, keys, decoders.key_CC, rotation, position_T)
    score_HQT = score_GMT.view(heads, queries, -1)
    weight_HQT = softmax_weights(score_HQT, scoring, mask_QT)
    weight_PT = weight_HQT.view(heads * queries, -1).to(query_HQD.dtype)  # P = H·Q
    latent_PC = torch.zeros(heads * queries, values.width, dtype=score_HQT.dtype, device=weight_PT.device)
    # Weights in the order of the buckets: one gather for all of them.
    buckets = values.buckets()
    for coef, weight_PN in zip(
        buckets, weight_PT[:, values.order()].split([coef.length for coef in buckets], dim=1), strict=True
    ):
        latent_PC[:, : coef.rank] += coef.weighted_sum(weight_PN)
    value_decoder_GCD = decoders.value_CC.view(-1, groups, head_dim).transpose(0, 1)
    latent_PC = latent_PC.to(query_HQD.dtype)
    return (latent_PC.view(groups, -1, values.width) @ value_decoder_GCD).view(heads, queries, head_dim)


def _scores_rebuilt(
    query_GMD: Tensor, keys: RaggedStore, decoder_CC: Tensor, rotation: Rotation, position_T: Tensor | None
) -> Tensor:
    order_T = keys.order()
    positions = order_T if position_T is None else position_T[order_T]
    in_order_GMT = rebuild_scores(query_GMD, keys.buckets(), decoder_CC, rotation, positions)
    score_GMT = torch.empty_like(in_order_GMT)
    score_GMT[:, :, order_T] = in_order_GMT
    return score_GMT


def _scores_absorbed(query_GMD: Tensor, keys: RaggedStore, decoder_CC: Tensor) -> Tensor:
    groups, rows, head_dim = query_GMD.shape
    decoder_GDC = decoder_CC.view(-1, groups, head_dim).permute(1, 2, 0)
    exact_GMD = at_least_fp32(query_GMD)
    latent_PC = (exact_GMD @ decoder_GDC.to(exact_GMD.dtype)).view(groups * rows, -1)
    score_PT = latent_PC.new_empty(groups * rows, keys.length)
    in_order_PT = [coef.dot(latent_PC[:, : coef.rank]) for coef in keys.buckets()]
    score_PT[:, keys.order()] = torch.cat(in_order_PT, dim=1)
    return score_PT.view(groups, rows, -1)
