"""Scores of keys that were compressed before rotation: rebuilt, rotated and multiplied tile by tile.

No more than one tile of keys ever exists at full width.

Shapes: G KV heads of a part, D head dim, M rows of queries that share a KV head, N tokens of a piece or tile, T all tokens,
C = G·D, R rank.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from lowrank_kv.ops.rotation import Positions, Rotation, slice_positions

# Rebuilt keys of one tile stay within the cores' caches: 2,048 tokens × 192 × 4 bytes is 1.5 MiB.
TILE_TOKENS = 2048
# All heads' scores are one product with zeros between different heads, as long as it has no more columns than a vector
# register holds: on a CPU it then costs as much as a single head's.
MAX_JOINT_ROWS = 16


class Rows(Protocol):
    """Coefficients of equal rank."""

    length: int

    def rows(self, start: int, end: int) -> Tensor:
        """Rows `start` to `end`, (N, R)."""


def rebuild_scores(
    query_GMD: Tensor, pieces: list[Rows], decoder_RC: Tensor, rotation: Rotation, positions: Positions
) -> Tensor:
    """Scores of all tokens of `pieces`, in their order.

    Args:
        query_GMD: rotated queries.
        pieces: coefficients, each piece with a rank of its own.
        decoder_RC: rebuilds a key from coefficients; a piece of lower rank uses its first rows.
        rotation: of the keys.
        positions: of the pieces' tokens in their sequence, piece after piece.

    Returns:
        (G, M, T) in fp32 at least, not yet scaled.
    """
    groups, rows, head_dim = query_GMD.shape
    total = sum(piece.length for piece in pieces)
    query_GMD, decoder_RC, rotate = rotation.prepare(query_GMD, decoder_RC)
    query_GMD = at_least_fp32(query_GMD)  # keys are rebuilt in the model's dtype, scores are not rounded to it
    score_GMT = query_GMD.new_empty(groups, rows, total)
    is_joint = groups * rows <= MAX_JOINT_ROWS and query_GMD.device.type == "cpu"
    query_CP = _block_diagonal(query_GMD) if is_joint else None
    key_NC = decoder_RC.new_empty(min(TILE_TOKENS, total), decoder_RC.shape[1])
    start = 0
    for tile in _tiles(pieces, TILE_TOKENS):
        # Pieces are rebuilt side by side and rotated together: one operation for each piece, not a dozen.
        count = 0
        for coef_NR in tile:
            end = count + len(coef_NR)
            torch.mm(coef_NR, decoder_RC[: coef_NR.shape[1]], out=key_NC[count:end])
            count = end
        key_GND = rotate(key_NC[:count].view(-1, groups, head_dim), slice_positions(positions, start, start + count))
        key_GND = key_GND.to(query_GMD.dtype)
        tile_GMN = score_GMT[:, :, start : start + count]
        if is_joint:
            tile_GMN.copy_((key_GND.transpose(0, 1).reshape(count, -1) @ query_CP).T.view(groups, rows, count))
        else:
            tile_GMN.copy_(query_GMD @ key_GND.mT)
        start += count
    return score_GMT


def at_least_fp32(states: Tensor) -> Tensor:
    """States in fp32, or in fp64 where they are already: the precision of scores and of the softmax."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


def _block_diagonal(query_GMD: Tensor) -> Tensor:
    """Queries as columns that are zero outside their own KV head, (C, P) with P = G·M."""
    groups, rows, head_dim = query_GMD.shape
    query_GDGM = query_GMD.new_zeros(groups, head_dim, groups, rows)
    query_GDGM.diagonal(dim1=0, dim2=2).copy_(query_GMD.permute(2, 1, 0))
    return query_GDGM.view(groups * head_dim, groups * rows)


def _tiles(pieces: list[Rows], size: int) -> Iterator[list[Tensor]]:
    """The pieces' rows in runs of at most `size`, each a list of parts of pieces."""
    tile, room = [], size
    for piece in pieces:
        start = 0
        while start < piece.length:
            end = min(start + room, piece.length)
            tile.append(piece.rows(start, end))
            room -= end - start
            start = end
            if not room:
                yield tile
                tile, room = [], size
    if tile:
        yield tile
