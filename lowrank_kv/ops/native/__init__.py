"""What decoding does at every token, on a CPU in compiled code, where the machine has a C compiler: attention, the
rotations it needs, and new tokens' way into a cache."""

from lowrank_kv.ops.native.attention import Decoders, Tokens, Turns, attend, refusal
from lowrank_kv.ops.native.encoding import Encoder, Entrance, NewTokens, TurnedHalves, encoder_of, encodes
from lowrank_kv.ops.native.rotating import angles, computes_angles
from lowrank_kv.ops.native.table import Piece, Table, appends

__all__ = [
    "Decoders",
    "Encoder",
    "Entrance",
    "NewTokens",
    "Piece",
    "Table",
    "Tokens",
    "TurnedHalves",
    "Turns",
    "angles",
    "appends",
    "attend",
    "computes_angles",
    "encoder_of",
    "encodes",
    "refusal",
]
