"""Compiled code for decoding on a CPU, where the machine has a C compiler: attention, the rotations it needs, and encoding
and appending new tokens."""

from lowrank_kv.ops.native.attention import PackedDecoders, Tokens, attend, multiplies_pairs, unsupported_reason
from lowrank_kv.ops.native.encoding import AppendTarget, EncodedTokens, Encoder, encoder_of, encodes
from lowrank_kv.ops.native.packing import compiled_writer
from lowrank_kv.ops.native.rotary import PackedRotary, computes_cos_sin, cos_sin, slow_from
from lowrank_kv.ops.native.store_view import RankBucketView, StoreView, appends

__all__ = [
    "PackedDecoders",
    "Encoder",
    "AppendTarget",
    "EncodedTokens",
    "RankBucketView",
    "StoreView",
    "Tokens",
    "PackedRotary",
    "appends",
    "attend",
    "compiled_writer",
    "computes_cos_sin",
    "cos_sin",
    "encoder_of",
    "encodes",
    "multiplies_pairs",
    "slow_from",
    "unsupported_reason",
]
