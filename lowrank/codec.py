"""What a compressed cache asks of a method: rows to coefficients and back.

Shapes: B batch, T tokens, C joint width, R rank.
"""

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from lowrank.allocation import check_rank
from lowrank.basis import ROPE_SIDES, Basis
from lowrank.errors import UserError


class Codec(Protocol):
    """Maps joint keys or values to coefficients of which each token keeps a prefix."""

    width: int
    constant_rank: int | None  # the rank of every token when it is the same for all, else None

    def encode(self, states_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """(coef_BTC, rank_BT): the coefficients in order of importance, and how many each token keeps (int64)."""

    def decoder(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The (C, C) matrix whose first R rows rebuild a token from its first R coefficients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCodec:
    """How one layer's keys and values are compressed.

    Attributes:
        key, value: the two codecs.
        rope: ``pre`` compresses keys before rotation and rotates what is rebuilt (DynaKV); ``post`` compresses rotated
            keys, which then never need rebuilding (OjaKV).
    """

    key: Codec
    value: Codec
    rope: str = "pre"

    def __post_init__(self):
        if self.rope not in ROPE_SIDES:
            raise UserError(f"`rope` must be one of {', '.join(ROPE_SIDES)}; got {self.rope!r}")


class FixedCodec:
    """A fixed orthonormal basis and one rank for all tokens (StaticPCA, SubSpace-G)."""

    def __init__(self, basis: Basis, rank: int):
        check_rank(rank, basis.width)
        self.basis = basis
        self.width, self.constant_rank = basis.width, rank
        self._placed: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def encode(self, states_BTC: Tensor) -> tuple[Tensor, Tensor]:
        vectors_CC = self._vectors(states_BTC.dtype, states_BTC.device)
        rank_BT = torch.full(states_BTC.shape[:2], self.constant_rank, device=states_BTC.device)
        return states_BTC @ vectors_CC, rank_BT

    def decoder(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._vectors(dtype, device).T

    def _vectors(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if (dtype, device) not in self._placed:
            self._placed[dtype, device] = self.basis.vectors_CC.to(device, dtype)
        return self._placed[dtype, device]


def prefix_mask(rank_BT: Tensor, width: int) -> Tensor:
    """The hard mask of equation 2 (DynaKV): True for the first ``rank_BT`` of `width` coefficients, (B, T, C) bool."""
    return torch.arange(width, device=rank_BT.device) < rank_BT[..., None]
