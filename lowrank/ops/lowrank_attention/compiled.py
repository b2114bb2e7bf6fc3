"""Decode attention over low-rank and full-rank tokens on a CPU, the low-rank ones in compiled code.

Shapes: as in :mod:`lowrank.ops.lowrank_attention.dense`.
"""

import torch
from torch import Tensor

from lowrank.ops import native
from lowrank.ops.capped import capped
from lowrank.ops.lowrank_attention.dense import Operands
from lowrank.ops.rotation import Places, Rotation


def serves(
    keys: Operands, values: Operands, rotation: Rotation | None, places: Places | None, mask_QT: Tensor | None
) -> bool:
    """Whether :func:`lowrank_attention` can attend over these tokens: where all parts hold the same ones, and keys have as
    many parts as values."""
    if keys.basis_PWR.shape[0] != values.basis_PWR.shape[0]:
        return False
    is_shared = all(not isinstance(each, Tensor) or each.dim() == dims for each, dims in ((places, 1), (mask_QT, 2)))
    return keys.coef.length > 0 and is_shared and native.serves(keys.coef.dtype, keys.coef.device, rotation)


def lowrank_attention(
    query_HQD: Tensor,
    keys: Operands,
    values: Operands,
    *,
    scaling: float,
    rotation: Rotation | None = None,
    places: Places | None = None,
    softcap: float | None = None,
    mask_QT: Tensor | None = None,
) -> Tensor:
    """See :func:`lowrank.ops.lowrank_attention.lowrank_attention`."""
    heads, queries, head_dim = query_HQD.shape
    groups, low = keys.full_GFD.shape[0], keys.coef.length
    query_GMD = query_HQD.reshape(groups, -1, head_dim).float()
    options = {}
    if rotation is None:
        low_query_GMX = query_GMD @ keys.head_basis().float()
    else:
        low_query_GMX = query_GMD
        options = {"decoder_PRW": keys.basis_PWR.mT, "angle_TF": rotation.angle_TF, "place_T": places}
    low_GMD, logsumexp_GM = native.attend(
        low_query_GMX,
        [native.Piece(keys.coef)],
        [native.Piece(values.coef)],
        values.basis_PWR.mT,
        scaling=scaling,
        slots=low,
        queries=queries,
        softcap=softcap,
        mask_QT=None if mask_QT is None else mask_QT[:, :low],
        **options,
    )
    full_GMF = capped(query_GMD @ keys.full_GFD.mT.float() * scaling, softcap)
    if mask_QT is not None:
        full_HQF = full_GMF.view(heads, queries, -1)
        full_GMF = full_HQF.masked_fill(~mask_QT[:, low:], torch.finfo(torch.float32).min).view(full_GMF.shape)
    # All low-rank tokens together are one more token of the softmax.
    weight_GMT = torch.cat([logsumexp_GM[..., None], full_GMF], dim=2).softmax(dim=-1)
    output_GMD = weight_GMT[..., :1] * low_GMD + weight_GMT[..., 1:] @ values.full_GFD.float()
    return output_GMD.view(heads, queries, head_dim).to(query_HQD.dtype)
