"""Decode attention on a CPU in compiled code, where the machine has a C compiler."""

from lowrank.ops.native.attention import Piece, attend, serves

__all__ = ["Piece", "attend", "serves"]
