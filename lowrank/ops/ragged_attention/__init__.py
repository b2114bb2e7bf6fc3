"""Decode attention over a cache whose tokens keep different numbers of coefficients."""

from lowrank.ops.ragged_attention.bucketed import ragged_attention

__all__ = ["ragged_attention"]
