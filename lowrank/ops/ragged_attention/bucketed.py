"""Decode attention over a ragged cache in plain torch, one dense matrix product per rank.

Attention does not care about the order of tokens, so each bucket of equal rank is multiplied as it lies. Keys that were
compressed before rotation are rebuilt tile by tile; values never are: out = (softmax · coef_v) · decoder_v, and the
bracket is a single (C,) vector per query whatever the number of tokens. The same folding serves keys that were
compressed after rotation: q · (coef_k · decoder_k)ᵀ = (q · decoder_kᵀ) · coef_kᵀ.

Shapes: H query heads, G KV heads, J = H/G queries per KV head, Q new queries, D head dim, C = G·D joint width,
T cached tokens, N tokens of a bucket or tile, R rank.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lowrank.ragged import RaggedStore

# Rebuilt keys of one tile stay within a core's cache: 1,024 tokens × 192 × 4 bytes is 0.75 MiB.
TILE_TOKENS = 1024

Rotate = Callable[[Tensor, Tensor], Tensor]


def ragged_attention(
    query_HQD: Tensor,
    keys: RaggedStore,
    values: RaggedStore,
    key_decoder_CC: Tensor,
    value_decoder_CC: Tensor,
    *,
    scaling: float,
    rotate: Rotate | None = None,
    mask_QT: Tensor | None = None,
) -> Tensor:
    """Attention of Q queries of one sequence over its T cached tokens (DynaKV section 3.2, equation 3).

    Args:
        query_HQD: rotated queries.
        keys, values: the sequence's coefficient stores, T rows each; their ranks need not agree.
        key_decoder_CC, value_decoder_CC: U⁻¹ of keys and values, rows in order of the coefficients.
        scaling: the model's own score scale, usually 1/√D.
        rotate: ``rotate(key_GND, position_N)`` rotates rebuilt keys, given their places in the sequence; None when the
            stored keys are already rotated.
        mask_QT: True where a query may see a token; None when it may see all.

    Returns:
        (H, Q, D) in the dtype of `query_HQD`; scores and softmax are in fp32.
    """
    heads, queries, head_dim = query_HQD.shape
    groups = key_decoder_CC.shape[1] // head_dim
    query_GMD = query_HQD.reshape(groups, -1, head_dim)  # M = J·Q rows share a KV head
    if rotate is None:
        score_GMT = _scores_absorbed(query_GMD, keys, key_decoder_CC)
    else:
        score_GMT = _scores_rebuilt(query_GMD, keys, key_decoder_CC, rotate)
    score_HQT = score_GMT.view(heads, queries, -1).float() * scaling
    if mask_QT is not None:
        score_HQT = score_HQT.masked_fill(~mask_QT, torch.finfo(torch.float32).min)
    weight_PT = score_HQT.softmax(dim=-1).view(heads * queries, -1).to(query_HQD.dtype)  # P = H·Q
    latent_PC = weight_PT.new_zeros(heads * queries, values.width)
    for rank, coef_NR, position_N in values.buckets():
        latent_PC[:, :rank] += weight_PT[:, position_N] @ coef_NR
    value_decoder_GCD = value_decoder_CC.view(-1, groups, head_dim).transpose(0, 1)
    return (latent_PC.view(groups, -1, values.width) @ value_decoder_GCD).view(heads, queries, head_dim)


def _scores_rebuilt(query_GMD: Tensor, keys: RaggedStore, decoder_CC: Tensor, rotate: Rotate) -> Tensor:
    groups, rows, head_dim = query_GMD.shape
    score_GMT = query_GMD.new_empty(groups, rows, keys.length)
    for rank, coef_NR, position_N in keys.buckets():
        for coef_tile_NR, position_tile_N in zip(
            coef_NR.split(TILE_TOKENS), position_N.split(TILE_TOKENS), strict=True
        ):
            key_NC = coef_tile_NR @ decoder_CC[:rank]
            key_GND = rotate(key_NC.view(-1, groups, head_dim).transpose(0, 1), position_tile_N)
            score_GMT[:, :, position_tile_N] = query_GMD @ key_GND.transpose(1, 2)
    return score_GMT


def _scores_absorbed(query_GMD: Tensor, keys: RaggedStore, decoder_CC: Tensor) -> Tensor:
    groups, rows, head_dim = query_GMD.shape
    decoder_GDC = decoder_CC.view(-1, groups, head_dim).permute(1, 2, 0)
    latent_PC = (query_GMD @ decoder_GDC).view(groups * rows, -1)
    score_PT = latent_PC.new_empty(groups * rows, keys.length)
    for rank, coef_NR, position_N in keys.buckets():
        score_PT[:, position_N] = latent_PC[:, :rank] @ coef_NR.T
    return score_PT.view(groups, rows, -1)
