"""Decode attention over low-rank and full-rank tokens on a CPU in compiled code.

Shapes: as in :mod:`lowrank_kv.ops.lowrank_attention.eager`.
"""

import torch
from torch import Tensor

from lowrank_kv.ops import native
from lowrank_kv.ops.lowrank_attention.tokens import LowRankTokens
from lowrank_kv.ops.native.full_rank_view import full_rank_view
from lowrank_kv.ops.native.library import CPU, contiguous_fp32
from lowrank_kv.ops.native.reading import coefficients_view, is_planned
from lowrank_kv.ops.rotation import rotates_in_pairs
from lowrank_kv.ops.scoring import Scoring


def unsupported_reason(tokens: LowRankTokens) -> str | None:
    """Why :func:`lowrank_attention` cannot attend over these tokens on a CPU; None where it can: all parts hold the same
    tokens, and keys have as many parts as values."""
    keys = tokens.keys
    if keys.basis_PWR.shape[0] != tokens.values.basis_PWR.shape[0]:
        return "keys are not cut into as many parts as values"
    if tokens.parts_differ:
        return "each part holds tokens of its own"
    if not keys.coef.length:
        return "there are no low-rank tokens"
    return native.unsupported_reason(keys.coef.dtype, CPU, in_pairs=rotates_in_pairs(tokens.rotation))


def lowrank_attention(query_HQD: Tensor, tokens: LowRankTokens, scoring: Scoring) -> Tensor:
    """See :func:`lowrank_kv.ops.lowrank_attention.lowrank_attention`."""
    keys, values, rotation, positions, mask_QT = tokens
    shape_HQD, groups = query_HQD.shape, keys.full.buffer.shape[0]
    low, full = keys.coef.length, keys.full.length
    query, mask_of_low, mask_of_full = contiguous_fp32(query_HQD), None, None
    if mask_QT is not None:
        mask_of_low, mask_of_full = mask_QT[:, :low], mask_QT[:, low:]
    if rotation is None:
        query_GMD = query.reshape(groups, -1, shape_HQD[2])
        low_query = contiguous_fp32(query_GMD @ keys.head_basis().float())
        key_decoder_PRW, rotary, positions, paired = None, None, None, False
    else:
        low_query, key_decoder_PRW, rotary = query, keys.decoder_PRW, rotation.table.packed
        paired = _are_paired(shape_HQD[2], tokens)
    decoders = native.PackedDecoders(
        key_decoder_PRW,
        values.decoder_PRW,
        head_dim=shape_HQD[2] if paired else None,
        key_memo=keys.prepared,
        value_memo=values.prepared,
    )
    held = coefficients_view(keys.coef), coefficients_view(values.coef), low
    softmax = [native.Tokens(low_query, *held, decoders, rotary, positions, mask_of_low)]
    if full:
        held = full_rank_view(keys.full), full_rank_view(values.full), full
        softmax.append(native.Tokens(query, *held, mask_QT=mask_of_full))
    shape_BHQD = 1, *shape_HQD
    output_1QHD = native.attend([softmax], shape_BHQD, scoring, groups=groups)
    if query_HQD.dtype != torch.float32:
        output_1QHD = output_1QHD.to(query_HQD.dtype)
    if shape_HQD[1] == 1:
        return output_1QHD.view(shape_HQD)  # one view instead of two, for every decoded token
    return output_1QHD.squeeze(0).transpose(0, 1)


def _are_paired(head_dim: int, tokens: LowRankTokens) -> bool:
    """Whether both keys and values are planned coefficients that compiled code multiplies two at a time."""
    keys, values, rotation, _, _ = tokens
    if not (is_planned(keys.coef) and is_planned(values.coef)) or keys.basis_PWR.shape[0] > 1:
        return False
    return native.multiplies_pairs(keys.coef.dtype, head_dim, 2 * rotation.table.cos_BTF.shape[-1])
