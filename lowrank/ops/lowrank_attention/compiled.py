"""Decode attention over low-rank and full-rank tokens on a CPU in compiled code.

Shapes: as in :mod:`lowrank.ops.lowrank_attention.dense`.
"""

from torch import Tensor

from lowrank.coefficients import Coefficients
from lowrank.growing import GrowingTensor
from lowrank.ops import native
from lowrank.ops.lowrank_attention.dense import Operands
from lowrank.ops.rotation import Places, Rotation


def refusal(
    keys: Operands, values: Operands, rotation: Rotation | None, places: Places | None, mask_QT: Tensor | None
) -> str | None:
    """What keeps :func:`lowrank_attention` from attending over these tokens; None where all parts hold the same ones, and
    keys have as many parts as values."""
    if keys.basis_PWR.shape[0] != values.basis_PWR.shape[0]:
        return "keys are not cut into as many parts as values"
    if any(isinstance(each, Tensor) and each.dim() != dims for each, dims in ((places, 1), (mask_QT, 2))):
        return "each part holds tokens of its own"
    if not keys.coef.length:
        return "there are no low-rank tokens"
    return native.refusal(keys.coef.dtype, keys.coef.device, in_pairs=rotation is None or rotation.in_pairs)


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
    groups, _, head_dim = keys.full.buffer.shape
    low, full = keys.coef.length, keys.full.length
    low_query_MX, key_decoder_PRW, options = query_HQD, None, {}
    if rotation is None:
        low_query_MX = query_HQD.reshape(groups, -1, head_dim).float() @ keys.head_basis().float()
    else:
        key_decoder_PRW, options = keys.decoder_PRW, {"turns": rotation.turns, "place_T": places}
    tokens = [
        native.Tokens(
            low_query_MX,
            _table(keys.coef),
            _table(values.coef),
            slots=low,
            decoders=native.Decoders(key_decoder_PRW, values.decoder_PRW),
            mask_QT=None if mask_QT is None else mask_QT[:, :low],
            **options,
        )
    ]
    if full:
        tokens.append(
            native.Tokens(
                query_HQD,
                _whole_table(keys.full),
                _whole_table(values.full),
                slots=full,
                mask_QT=None if mask_QT is None else mask_QT[:, low:],
            )
        )
    output_HQD = native.attend(tokens, query_HQD.shape, groups=groups, scaling=scaling, softcap=softcap)
    return output_HQD if output_HQD.dtype == query_HQD.dtype else output_HQD.to(query_HQD.dtype)


def _table(coef: Coefficients) -> native.Table:
    if coef.memo is None:
        coef.memo = native.Table([native.Piece.of(coef)], coef.rank)
    return coef.memo


def _whole_table(full: GrowingTensor) -> native.Table:
    """Of tokens at full rank, whose number alone changes until they are moved."""
    if full.memo is None:
        full.memo = native.Table([native.Piece.whole(full.buffer)], full.buffer.shape[2])
    full.memo.count_whole(full.length)
    return full.memo
