"""Decode attention over a ragged cache on a CPU, in compiled code.

Shapes: H query heads, G KV heads, Q new queries, D head dim, C = G·D joint width, R rank, T cached tokens.
"""

from torch import Tensor

from lowrank.ops import native
from lowrank.ops.decoders import Decoders
from lowrank.ops.ragged_table import table_of
from lowrank.ops.rotation import Rotation
from lowrank.ragged import RaggedStore


def refusal(keys: RaggedStore, rotation: Rotation | None) -> str | None:
    """What keeps :func:`ragged_attention` from attending over these stores; None where it can."""
    if not keys.length:
        return "there are no tokens"
    return native.refusal(keys.dtype, keys.device, in_pairs=rotation is None or rotation.in_pairs)


def ragged_attention(
    query_HQD: Tensor,
    keys: RaggedStore,
    values: RaggedStore,
    decoders: Decoders,
    *,
    scaling: float,
    rotation: Rotation | None = None,
    place_T: Tensor | None = None,
    softcap: float | None = None,
    mask_QT: Tensor | None = None,
) -> Tensor:
    """See :func:`lowrank.ops.ragged_attention.ragged_attention`."""
    groups = decoders.key_CC.shape[1] // query_HQD.shape[2]
    if rotation is None:
        head_decoder_GCD = decoders.key_CC.unflatten(1, (groups, -1)).transpose(0, 1)
        query_MX = query_HQD.reshape(groups, -1, query_HQD.shape[2]).float() @ head_decoder_GCD.mT.float()
        read_by, turns = native.Decoders(None, decoders.value_CC), None
    else:
        query_MX, read_by, turns = query_HQD, decoders.compiled(), rotation.turns
    tokens = native.Tokens(
        query_MX,
        table_of(keys),
        table_of(values),
        slots=keys.length,
        decoders=read_by,
        turns=turns,
        place_T=place_T,
        mask_QT=mask_QT,
    )
    output_HQD = native.attend([tokens], query_HQD.shape, groups=groups, scaling=scaling, softcap=softcap)
    return output_HQD if output_HQD.dtype == query_HQD.dtype else output_HQD.to(query_HQD.dtype)
