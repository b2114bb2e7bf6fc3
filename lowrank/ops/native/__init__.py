"""Decode attention, and new tokens' way into a cache, on a CPU in compiled code, where the machine has a C compiler."""

from lowrank.ops.native.attention import Piece, Tokens, attend, serves
from lowrank.ops.native.encoding import SideWeights, encode, encodes

__all__ = ["Piece", "SideWeights", "Tokens", "attend", "encode", "encodes", "serves"]
