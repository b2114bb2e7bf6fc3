"""What a compressed cache asks of a method: rows to coefficients and back.

Shapes: B batch, T tokens, C joint width, R kept coefficients.
"""

import dataclasses
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Maps joint keys or values to coefficients of which each token keeps a prefix."""

    width: int

    def encode(self, states_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """(coef_BTC, rank_BT): the coefficients in order of importance, and how many each token keeps (int64)."""

    def decoder(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The (C, C) matrix whose first R rows rebuild a token from its first R coefficients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCodec:
    """How one layer's keys (before rotation) and values are compressed."""

    key: Codec
    value: Codec


def prefix_mask(rank_BT: Tensor, width: int) -> Tensor:
    """The hard mask of equation 2 (DynaKV): True for the first ``rank_BT`` of `width` coefficients, (B, T, C) bool."""
    return torch.arange(width, device=rank_BT.device) < rank_BT[..., None]
