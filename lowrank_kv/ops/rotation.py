"""Rotating keys at given positions of a sequence: by a table of angles, or by the family's own function.

Every rotary kind, scaled or not, over all of a head or a part of it, is a table as long as it rotates the pairs (j, j + E/2)
of a head's first E dims by one angle each.

Shapes: B batch (or 1 where all sequences agree), G KV heads, M rows of queries that share a KV head, N tokens, T positions,
P parts, D head dim, E rotary dims (≤ D), F = E/2, C = G·D, X any dims.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lowrank_kv.ops import native
from lowrank_kv.utils.config import require

# The positions of tokens in their sequence: a slice where they follow one another, which needs no gathering.
Positions = slice | Tensor
# (key_GND, positions) → key_GND
Rotate = Callable[[Tensor, Positions], Tensor]


def slice_positions(positions: Positions, start: int, end: int) -> Positions:
    """The positions of tokens `start` to `end` of those given."""
    if isinstance(positions, slice):
        return slice(positions.start + start, positions.start + end)
    return positions[start:end]


def positions_of_part(positions: Positions, part: int) -> Positions:
    """One part's positions, where each part holds tokens of its own, (P, N); otherwise all parts have the same."""
    return positions[part] if isinstance(positions, Tensor) and positions.dim() == 2 else positions


@dataclasses.dataclass(frozen=True)
class RotaryTable:
    """The rotation of every position, by which kernels rotate keys.

    Attributes:
        cos_BTF, sin_BTF: scaling included, any floating dtype; contiguous in F.
        slow_from: the first pair of those that turn slowly (:func:`lowrank_kv.ops.native.slow_from`), where the table's rows
            are those of consecutive positions; None where that is not known.
    """

    cos_BTF: Tensor
    sin_BTF: Tensor
    slow_from: int | None = None

    def __post_init__(self):
        require(
            self.cos_BTF.stride() == self.sin_BTF.stride() and self.cos_BTF.stride(2) == 1,
            "cos_BTF",
            self.cos_BTF.stride(),
            f"laid out as sin_BTF {self.sin_BTF.stride()}, with F contiguous",
        )

    @classmethod
    def from_complex(cls, angle_BTF: Tensor, dtype: torch.dtype = torch.float32) -> "RotaryTable":
        """From cos + i·sin."""
        return cls(angle_BTF.real.to(dtype).contiguous(), angle_BTF.imag.to(dtype).contiguous())

    def for_sequence(self, sequence: int, device: torch.device) -> "RotaryTable":
        """One sequence's table, a batch of one, on a device."""
        row = sequence if self.cos_BTF.shape[0] > 1 else 0
        tables = (table[row : row + 1].to(device) for table in (self.cos_BTF, self.sin_BTF))
        return RotaryTable(*tables, self.slow_from)

    @functools.cached_property
    def packed(self) -> native.PackedRotary:
        """The table for compiled code, which reads a batch of one."""
        return native.PackedRotary(self.cos_BTF, self.sin_BTF, self.slow_from)

    @functools.cached_property
    def complex_TF(self) -> Tensor:  # noqa: N802 (a tensor's dims are part of its name)
        """cos + i·sin of every position, complex64, of a batch of one."""
        return torch.complex(self.cos_BTF[0].float(), self.sin_BTF[0].float())

    def rotate(self, key_BGND: Tensor, position_BN: Tensor) -> Tensor:
        """Rotated keys in their own dtype, each at its position."""
        batch, half = key_BGND.shape[0], self.cos_BTF.shape[2]
        b = torch.arange(batch, device=position_BN.device)[:, None] if self.cos_BTF.shape[0] > 1 else 0
        cos, sin = (table[b, position_BN.long()][:, None].to(key_BGND.dtype) for table in (self.cos_BTF, self.sin_BTF))
        first, second = key_BGND[..., :half], key_BGND[..., half : 2 * half]
        rotated = [first * cos - second * sin, second * cos + first * sin]
        return torch.cat([*rotated, key_BGND[..., 2 * half :]], dim=-1)

    @functools.cached_property
    def inverse(self) -> "RotaryTable":
        """The table that undoes this one. It divides by the square of a pair's length, as some kinds scale both."""
        square_BTF = self.cos_BTF.square() + self.sin_BTF.square()
        return RotaryTable(self.cos_BTF / square_BTF, -self.sin_BTF / square_BTF)

    def prepare(self, query_GMD: Tensor, decoder_XC: Tensor) -> tuple[Tensor, Tensor, Rotate]:
        """See :meth:`Rotation.prepare`; for a batch of one.

        Decoder and queries are reordered so that a pair lies side by side: a tile of keys is then rotated by one complex
        product in place. Scores do not depend on the order of the dims. Half precision is rotated in fp32, as complex
        numbers need it.
        """
        head_dim, rotary = query_GMD.shape[-1], 2 * self.complex_TF.shape[1]

        def rotate(key_NGD: Tensor, positions: Positions) -> Tensor:
            key_NGD = key_NGD.float()
            pairs_NGF = torch.view_as_complex(key_NGD[..., :rotary].unflatten(-1, (-1, 2)))
            pairs_NGF.mul_(self.complex_TF[positions][:, None])
            return key_NGD.transpose(0, 1)

        return (
            _pairs_adjacent(query_GMD.float(), head_dim, rotary),
            _pairs_adjacent(decoder_XC, head_dim, rotary),
            rotate,
        )


@dataclasses.dataclass(frozen=True)
class Rotation:
    """How the keys of one sequence are rotated.

    Attributes:
        rotate: the family's own rotation of keys at given positions.
        table: the same for a batch of one; None for a family that does not rotate the pairs (j, j + E/2) of a head.
    """

    rotate: Rotate
    table: RotaryTable | None = None

    def prepare(self, query_GMD: Tensor, decoder_XC: Tensor) -> tuple[Tensor, Tensor, Rotate]:
        """(queries, decoder, rotate) such that ``queries · rotate(key_NGD, positions)`` are the scores of rotated keys.

        Args:
            query_GMD: rotated queries.
            decoder_XC: whatever rebuilds keys, with the dims of one or of all heads last.

        Returns:
            the queries, the decoder, and ``rotate(key_NGD, positions)`` → (G, N, D), which may overwrite its input.
        """
        if self.table is not None:
            return self.table.prepare(query_GMD, decoder_XC)
        return query_GMD, decoder_XC, lambda key_NGD, positions: self.rotate(key_NGD.transpose(0, 1), positions)


def rotates_in_pairs(rotation: Rotation | None) -> bool:
    """Whether keys are rotated by a table, or not at all."""
    return rotation is None or rotation.table is not None


def _pairs_adjacent(states_XC: Tensor, head_dim: int, rotary: int) -> Tensor:
    """The same dims with j and j + E/2 of every head's first E side by side."""
    heads_XGD = states_XC.unflatten(-1, (-1, head_dim))
    pairs_XGE = heads_XGD[..., :rotary].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat([pairs_XGE, heads_XGD[..., rotary:]], dim=-1).flatten(-2)
