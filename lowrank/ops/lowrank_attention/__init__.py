"""Decode attention over low-rank tokens and tokens at full rank, in one softmax."""

from lowrank.ops.lowrank_attention.dense import Operands, lowrank_attention

__all__ = ["Operands", "lowrank_attention"]
