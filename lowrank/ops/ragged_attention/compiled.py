"""Decode attention over a ragged cache on a CPU, in compiled code.

Shapes: H query heads, G KV heads, Q new queries, D head dim, C = G·D joint width, R rank, T cached tokens.
"""

from torch import Tensor

from lowrank.ops import native
from lowrank.ops.rotation import Rotation
from lowrank.ragged import RaggedStore


def serves(keys: RaggedStore, rotation: Rotation | None) -> bool:
    """Whether :func:`ragged_attention` can attend over these stores."""
    return keys.length > 0 and native.serves(keys.dtype, keys.device, rotation)


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
    heads, queries, head_dim = query_HQD.shape
    groups = key_decoder_CC.shape[1] // head_dim
    query_GMD = query_HQD.reshape(groups, -1, head_dim).float()
    options = {}
    if rotation is None:
        query_GMD = query_GMD @ key_decoder_CC.view(-1, groups, head_dim).permute(1, 2, 0).float()
    else:
        options = {"decoder_PRW": key_decoder_CC[None], "angle_TF": rotation.angle_TF, "place_T": place_T}
    value_pieces = _pieces(values)
    tokens = native.Tokens(
        query_GMD,
        _pieces(keys),
        value_pieces,
        slots=keys.length,
        value_decoder_PRW=value_decoder_CC[None, : value_pieces[-1].rank],
        mask_QT=mask_QT,
        **options,
    )
    output_GMD = native.attend([tokens], head_dim, scaling=scaling, queries=queries, softcap=softcap)
    return output_GMD.view(heads, queries, head_dim).to(query_HQD.dtype)


def _pieces(store: RaggedStore) -> list[native.Piece]:
    buckets = store.filled()
    for bucket in buckets:
        if bucket.memo is None:
            bucket.memo = native.Piece.of(bucket.coef, bucket.position_N.buffer)
    return [bucket.memo for bucket in buckets]
