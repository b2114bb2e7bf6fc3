"""What decoding does at every token, on a CPU in compiled code, where the machine has a C compiler: attention, the
rotations it needs, and new tokens' way into a cache."""

from lowrank_kv.ops.native.attention import PackedDecoders, PackedRopeTable, Tokens, attend, unsupported_reason
from lowrank_kv.ops.native.encoding import AppendTarget, Encoder, NewTokens, PackedRope, encoder_of, encodes
from lowrank_kv.ops.native.rotating import angles, computes_angles
from lowrank_kv.ops.native.store_view import RankBucketView, StoreView, appends

__all__ = [
    "PackedDecoders",
    "Encoder",
    "AppendTarget",
    "NewTokens",
    "RankBucketView",
    "StoreView",
    "Tokens",
    "PackedRope",
    "PackedRopeTable",
    "angles",
    "appends",
    "attend",
    "computes_angles",
    "encoder_of",
    "encodes",
    "unsupported_reason",
]
