"""Decode attention over a ragged cache on a CPU, in compiled code.

Shapes: H query heads, G KV heads, Q new queries, D head dim, C = G·D joint width, R rank, T cached tokens.
"""

from torch import Tensor

from lowrank.ops import native
from lowrank.ops.ragged_table import table_of
from lowrank.ops.rotation import Rotation
from lowrank.ragged import RaggedStore


def refusal(keys: RaggedStore, rotation: Rotation | None) -> str | None:
    """What keeps :func:`ragged_attention` from attending over these stores; None where it can."""
    if not keys.length:
        return "there are no tokens"
    return native.refusal(keys.dtype, keys.device, rotation)


def ragged_attention(
    query_HQD: Tensor,
    keys: RaggedStore,
    values: RaggedStore,
    key_decoder_CC: Tensor,
    value_decoder_CC: Tensor,
    *,
    scaling: float,
    rotation: Rotation | None = None,
    place_T: Tensor | None = None,
    softcap: float | None = None,
    mask_QT: Tensor | None = None,
) -> Tensor:
    """See :func:`lowrank.ops.ragged_attention.ragged_attention`."""
    groups = key_decoder_CC.shape[1] // query_HQD.shape[2]
    query_MX, options = query_HQD, {}
    if rotation is None:
        head_decoder_GCD = key_decoder_CC.unflatten(1, (groups, -1)).transpose(0, 1)
        query_MX = query_HQD.reshape(groups, -1, query_HQD.shape[2]).float() @ head_decoder_GCD.mT.float()
    else:
        options = {"decoder_PRW": key_decoder_CC, "turns": rotation.table, "place_T": place_T}
    tokens = native.Tokens(
        query_MX,
        table_of(keys),
        table_of(values),
        slots=keys.length,
        value_decoder_PRW=value_decoder_CC,
        mask_QT=mask_QT,
        **options,
    )
    output_HQD = native.attend([tokens], query_HQD.shape, groups=groups, scaling=scaling, softcap=softcap)
    return output_HQD if output_HQD.dtype == query_HQD.dtype else output_HQD.to(query_HQD.dtype)
