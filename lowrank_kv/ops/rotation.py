"""Rotating keys at given places of a sequence.

Shapes: G KV heads, M rows of queries that share a KV head, N tokens, D head dim, E rotary dims (≤ D), C = G·D, R rank.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lowrank_kv.ops import native
from lowrank_kv.ops.rotary_table import RotaryTable

# Where tokens lie in their sequence: a slice where they follow one another, which needs no gathering.
Places = slice | Tensor
# (key_GND, places) → key_GND
Rotate = Callable[[Tensor, Places], Tensor]


def between(places: Places, start: int, end: int) -> Places:
    """The places of tokens `start` to `end` of those given."""
    if isinstance(places, slice):
        return slice(places.start + start, places.start + end)
    return places[start:end]


def of_part(places: Places, part: int) -> Places:
    """One part's places, where each part holds tokens of its own, (P, N); the same for all otherwise."""
    return places[part] if isinstance(places, Tensor) and places.dim() == 2 else places


@dataclasses.dataclass(frozen=True)
class Rotation:
    """How the keys of one sequence are rotated.

    Attributes:
        rotate: the family's own rotation of keys at given places.
        table: cos and sin of every place, of a batch of one, where the rotation turns the pairs (j, j + E/2) of a head; None
            for a family that rotates otherwise.
    """

    rotate: Rotate
    table: RotaryTable | None = None

    @functools.cached_property
    def packed(self) -> native.PackedRopeTable:
        """The table for compiled code; only where there is one."""
        return native.PackedRopeTable(self.table)

    @functools.cached_property
    def angle_TF(self) -> Tensor:  # noqa: N802 (a tensor's dims are part of its name)
        """cos + i·sin of every place, complex64; only where there is a table."""
        return torch.complex(self.table.cos_BTF[0].float(), self.table.sin_BTF[0].float())

    def prepare(self, query_GMD: Tensor, decoder_XC: Tensor) -> tuple[Tensor, Tensor, Rotate]:
        """(queries, decoder, turn) such that ``queries · turn(key_NGD, places)`` are the scores of rotated keys.

        Where the family rotates pairs, decoder and queries are reordered so that a pair lies side by side: turning a tile
        is then one complex product in place. A score does not depend on the order of the dims. Half precision is turned in
        fp32, which complex numbers need.

        Args:
            query_GMD: rotated queries.
            decoder_XC: whatever rebuilds keys, with the dims of one or of all heads last.

        Returns:
            the queries, the decoder, and ``turn(key_NGD, places)`` → (G, N, D), which may overwrite its input.
        """
        if self.table is None:
            return query_GMD, decoder_XC, lambda key_NGD, places: self.rotate(key_NGD.transpose(0, 1), places)
        head_dim, rotary = query_GMD.shape[-1], 2 * self.angle_TF.shape[1]

        def turn(key_NGD: Tensor, places: Places) -> Tensor:
            key_NGD = key_NGD.float()
            pairs_NGF = torch.view_as_complex(key_NGD[..., :rotary].unflatten(-1, (-1, 2)))
            pairs_NGF.mul_(self.angle_TF[places][:, None])
            return key_NGD.transpose(0, 1)

        return _paired(query_GMD.float(), head_dim, rotary), _paired(decoder_XC, head_dim, rotary), turn


def rotates_in_pairs(rotation: Rotation | None) -> bool:
    """Whether keys are rotated by a table, or not at all."""
    return rotation is None or rotation.table is not None


def _paired(states_XC: Tensor, head_dim: int, rotary: int) -> Tensor:
    """The same dims with j and j + E/2 of every head's first E side by side."""
    heads_XGD = states_XC.unflatten(-1, (-1, head_dim))
    turned_XGE = heads_XGD[..., :rotary].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat([turned_XGE, heads_XGD[..., rotary:]], dim=-1).flatten(-2)
