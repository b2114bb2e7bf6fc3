"""A rotation by each token's own angle, as rotary embeddings do, for the tests of the attention operations."""

import torch

from lowrank_kv.ops.lowrank_attention import LowRankTokens, Operands
from lowrank_kv.ops.rotation import RotaryTable, Rotation


def rotation(tokens: int, head_dim: int, generator: torch.Generator, *, rotary: int | None = None, pairs: bool = True):
    """Random angles for `tokens` positions; without `pairs` the operations must use the function, as there is no table."""
    rotary = rotary or head_dim
    half = rotary // 2
    angle = torch.rand(tokens, half, generator=generator) * 6

    def rotate(key_GND, positions):
        cos, sin = angle.cos()[positions].to(key_GND), angle.sin()[positions].to(key_GND)
        first, second = key_GND[..., :half], key_GND[..., half:rotary]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, key_GND[..., rotary:]], dim=-1)

    return Rotation(rotate, RotaryTable(angle.cos()[None], angle.sin()[None]) if pairs else None)


def rotated_tokens(keys: Operands, values: Operands, queries: int, generator: torch.Generator) -> LowRankTokens:
    """Tokens at positions from 7 on, of which queries see about four fifths, and all see the last."""
    count, (_, full, head_dim) = keys.coef.length, keys.full_GFD.shape
    mask_QT = torch.rand(queries, count + full, generator=generator) < 0.8
    mask_QT[:, -1] = True
    return LowRankTokens(keys, values, rotation(count + 9, head_dim, generator), slice(7, 7 + count), mask_QT)
