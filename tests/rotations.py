"""A rotation by each token's own angle, as rotary embeddings do, for the tests of the attention operations."""

import torch

from lowrank_kv.ops.lowrank_attention import LowRankTokens, Operands
from lowrank_kv.ops.rotation import RotaryTable, Rotation


def rotation(tokens: int, head_dim: int, generator: torch.Generator, *, rotary: int | None = None, pairs: bool = True):
    """Random angles for `tokens` positions; without `pairs` the operations must use the function, as there is no table."""
    angle = torch.rand(tokens, (rotary or head_dim) // 2, generator=generator) * 6
    found = rotation_of(RotaryTable(angle.cos()[None], angle.sin()[None]))
    return found if pairs else Rotation(found.rotate, None)


def rotation_of(table: RotaryTable) -> Rotation:
    """By a table, of as many pairs as that has."""
    half = table.cos_BTF.shape[2]

    def rotate(key_GND, positions):
        cos, sin = (each[0, positions].to(key_GND) for each in (table.cos_BTF, table.sin_BTF))
        first, second = key_GND[..., :half], key_GND[..., half : 2 * half]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, key_GND[..., 2 * half :]], dim=-1)

    return Rotation(rotate, table)


def rotated_tokens(keys: Operands, values: Operands, queries: int, generator: torch.Generator) -> LowRankTokens:
    """Tokens at positions from 7 on, of which queries see about four fifths, and all see the last."""
    count, (_, full, head_dim) = keys.coef.length, keys.full_GFD.shape
    mask_QT = torch.rand(queries, count + full, generator=generator) < 0.8
    mask_QT[:, -1] = True
    return LowRankTokens(keys, values, rotation(count + 9, head_dim, generator), slice(7, 7 + count), mask_QT)
