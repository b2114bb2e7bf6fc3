"""Decode attention over a ragged cache on a CPU, in compiled code.

Nearly every decoded token runs through this in every layer, and the model's weights have replaced Python's data in the
processor's caches by then: each step of Python is slow, so there are few.

Shapes: B batch, H query heads, G KV heads, Q new queries, D head dim, C = G·D joint width, M rows of queries that share a KV
head.
"""

from collections.abc import Sequence

from torch import Tensor

from lowrank_kv.ops import native
from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.native.library import contiguous_fp32
from lowrank_kv.ops.native.ragged_view import view_of
from lowrank_kv.ops.ragged_attention.tokens import RaggedTokens
from lowrank_kv.ops.rotation import rotates_in_pairs
from lowrank_kv.ops.scoring import Scoring


def unsupported_reason(sequences: Sequence[RaggedTokens]) -> str | None:
    """Why :func:`ragged_attention` cannot attend over these tokens; None where it can."""
    for tokens in sequences:
        if not tokens.keys.length:
            return "there are no tokens"
    first = sequences[0]
    return native.unsupported_reason(first.keys.dtype, first.keys.device, in_pairs=rotates_in_pairs(first.rotation))


def ragged_attention(
    query_BHQD: Tensor, sequences: Sequence[RaggedTokens], decoders: Decoders, scoring: Scoring
) -> Tensor:
    """See :func:`lowrank_kv.ops.ragged_attention.ragged_attention`."""
    shape_BHQD = query_BHQD.shape
    groups = decoders.key_CC.shape[1] // shape_BHQD[3]
    if sequences[0].rotation is None:
        query_BGMD = query_BHQD.reshape(shape_BHQD[0], groups, -1, shape_BHQD[3]).float()
        head_decoder_GDC = decoders.key_CC.float().unflatten(1, (groups, -1)).permute(1, 2, 0)
        queries = contiguous_fp32(query_BGMD @ head_decoder_GDC)
    else:
        queries = contiguous_fp32(query_BHQD)
    read_by = decoders.compiled(rebuilds_keys=sequences[0].rotation is not None)
    softmaxes = []
    for keys, values, rotation, position_T, mask_QT in sequences:
        rotary = None if rotation is None else rotation.table.packed
        held = view_of(keys), view_of(values), keys.length
        softmaxes.append([native.Tokens(queries, *held, read_by, rotary, position_T, mask_QT)])
    output_BQHD = native.attend(softmaxes, shape_BHQD, scoring, groups=groups)
    return output_BQHD if output_BQHD.dtype == query_BHQD.dtype else output_BQHD.to(query_BHQD.dtype)
