"""Decode attention over low-rank and full-rank tokens on a CPU in compiled code.

Shapes: as in :mod:`lowrank.ops.lowrank_attention.dense`.
"""

from torch import Tensor

from lowrank.ops import native
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
    tokens = [
        native.Tokens(
            low_query_GMX,
            [native.Piece.of(keys.coef)],
            [native.Piece.of(values.coef)],
            slots=low,
            value_decoder_PRW=values.basis_PWR.mT,
            mask_QT=None if mask_QT is None else mask_QT[:, :low],
            **options,
        )
    ]
    if keys.full_GFD.shape[1]:
        tokens.append(
            native.Tokens(
                query_GMD,
                [native.Piece.whole(keys.full_GFD)],
                [native.Piece.whole(values.full_GFD)],
                slots=keys.full_GFD.shape[1],
                mask_QT=None if mask_QT is None else mask_QT[:, low:],
            )
        )
    output_GMD = native.attend(tokens, head_dim, scaling=scaling, queries=queries, softcap=softcap)
    return output_GMD.view(heads, queries, head_dim).to(query_HQD.dtype)
