"""Decode attention over low-rank and full-rank tokens on a CPU in compiled code.

Shapes: as in :mod:`lowrank_kv.ops.lowrank_attention.eager`.
"""

from torch import Tensor

from lowrank_kv.ops import native
from lowrank_kv.ops.lowrank_attention.tokens import LowRankTokens
from lowrank_kv.ops.native.library import contiguous_fp32
from lowrank_kv.ops.rotation import rotates_in_pairs
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.token_plans import TokenPlans
from lowrank_kv.stores.tokenwise import TokenwiseCoefficients


def unsupported_reason(tokens: LowRankTokens) -> str | None:
    """Why :func:`lowrank_attention` cannot attend over these tokens; None where it can: all parts hold the same tokens, and
    keys have as many parts as values."""
    keys = tokens.keys
    if keys.basis_PWR.shape[0] != tokens.values.basis_PWR.shape[0]:
        return "keys are not cut into as many parts as values"
    if tokens.parts_differ:
        return "each part holds tokens of its own"
    if not keys.coef.length:
        return "there are no low-rank tokens"
    return native.unsupported_reason(keys.coef.dtype, keys.coef.device, in_pairs=rotates_in_pairs(tokens.rotation))


def lowrank_attention(
    query_HQD: Tensor,
    tokens: LowRankTokens,
    *,
    scaling: float,
    softcap: float | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """See :func:`lowrank_kv.ops.lowrank_attention.lowrank_attention`."""
    keys, values, rotation, positions, mask_QT = tokens
    groups, _, head_dim = keys.full.buffer.shape
    low, full = keys.coef.length, keys.full.length
    query_1HQD = contiguous_fp32(query_HQD)[None]
    mask_of_low, mask_of_full = (None, None) if mask_QT is None else (mask_QT[:, :low], mask_QT[:, low:])
    if rotation is None:
        query_1GMD = query_1HQD.reshape(1, groups, -1, head_dim)
        low_query_BMX = contiguous_fp32(query_1GMD @ keys.head_basis().float())
        key_decoder_PRW, rotary, positions = None, None, None
    else:
        low_query_BMX, key_decoder_PRW, rotary = query_1HQD, keys.decoder_PRW, rotation.table.packed
    held = _view(keys.coef), _view(values.coef), low
    paired = rotary is not None and _are_paired(query_HQD, tokens)
    decoders = native.PackedDecoders(
        key_decoder_PRW, values.decoder_PRW, paired=paired, key_memo=keys.prepared, value_memo=values.prepared
    )
    softmax = [native.Tokens(low_query_BMX, *held, decoders, rotary, positions, mask_of_low)]
    if full:
        held = _full_rank_view(keys.full), _full_rank_view(values.full), full
        softmax.append(native.Tokens(query_1HQD, *held, mask_QT=mask_of_full))
    shape_BHQD = 1, *query_HQD.shape
    [output_QHD] = native.attend([softmax], shape_BHQD, groups=groups, scaling=scaling, softcap=softcap, sink_H=sink_H)
    output_HQD = output_QHD.transpose(0, 1)
    return output_HQD if output_HQD.dtype == query_HQD.dtype else output_HQD.to(query_HQD.dtype)


def _are_paired(query_HQD: Tensor, tokens: LowRankTokens) -> bool:
    """Whether both keys and values are planned coefficients that compiled code multiplies two at a time."""
    keys, values, rotation, _, _ = tokens
    planned = all(isinstance(each.coef.quantization, (BitPlan, TokenPlans)) for each in (keys, values))
    if not planned or len(keys.basis_PWR) > 1:
        return False
    return native.multiplies_pairs(
        keys.coef.dtype,
        head_dim=query_HQD.shape[2],
        rotated_dims=2 * rotation.table.cos_BTF.shape[-1],
        queries=query_HQD.shape[0] * query_HQD.shape[1] // keys.full.buffer.shape[0],
    )


def _view(coef: Coefficients) -> native.StoreView:
    if isinstance(coef, TokenwiseCoefficients):
        where = [each.buffer.data_ptr() for each in (coef.stored, coef.classes, coef.marks)]
        if coef.native_view is None or coef.native_view[0] != where:
            coef.native_view = where, native.StoreView([native.RankBucketView.from_tokenwise(coef)], coef.rank)
        return coef.native_view[1]
    if coef.stored.native_view is None:
        coef.stored.native_view = native.StoreView([native.RankBucketView.from_coefficients(coef)], coef.rank)
    return coef.stored.native_view


def _full_rank_view(full: GrowingTensor) -> native.StoreView:
    if full.native_view is None:
        full.native_view = native.StoreView([native.RankBucketView.from_full_rank(full)], full.buffer.shape[2])
    return full.native_view
