"""Decode attention, and new tokens' way into a cache, on a CPU in compiled code, where the machine has a C compiler."""

from lowrank.ops.native.attention import Tokens, attend, serves
from lowrank.ops.native.encoding import SideWeights, encode, encodes
from lowrank.ops.native.rotating import angles, rotates
from lowrank.ops.native.table import Piece, Table, appends

__all__ = [
    "Piece",
    "SideWeights",
    "Table",
    "Tokens",
    "angles",
    "appends",
    "attend",
    "encode",
    "encodes",
    "rotates",
    "serves",
]
