"""Rotary embeddings as a table of cosines and sines, which is what kernels read.

Every rotary kind, scaled or not, over all of a head or a part of it, is such a table as long as it turns the pairs
(j, j + E/2) of a head's first E dims by one angle each.

Shapes: B batch (or 1 where all sequences agree), G KV heads, N tokens, T places, D head dim, E rotary dims (≤ D), F = E/2.
"""

import dataclasses

import torch
from torch import Tensor

from lowrank_kv.utils.config import require


@dataclasses.dataclass(frozen=True)
class RotaryTable:
    """Attributes:
    cos_BTF, sin_BTF: of every place, scaling included, any floating dtype; contiguous in F.
    """

    cos_BTF: Tensor
    sin_BTF: Tensor

    def __post_init__(self):
        require(
            self.cos_BTF.stride() == self.sin_BTF.stride() and self.cos_BTF.stride(2) == 1,
            "cos_BTF",
            self.cos_BTF.stride(),
            f"laid out as sin_BTF {self.sin_BTF.stride()}, with F contiguous",
        )

    @classmethod
    def of(cls, angle_BTF: Tensor, dtype: torch.dtype = torch.float32) -> "RotaryTable":
        """From cos + i·sin."""
        return cls(angle_BTF.real.to(dtype).contiguous(), angle_BTF.imag.to(dtype).contiguous())

    def of_sequence(self, sequence: int, device: torch.device) -> "RotaryTable":
        """One sequence's, a batch of one, on a device."""
        row = sequence if self.cos_BTF.shape[0] > 1 else 0
        return RotaryTable(*(table[row : row + 1].to(device) for table in (self.cos_BTF, self.sin_BTF)))

    def rotate(self, key_BGND: Tensor, place_BN: Tensor) -> Tensor:
        """Rotated keys in their own dtype, each at its place."""
        batch, half = key_BGND.shape[0], self.cos_BTF.shape[2]
        b = torch.arange(batch, device=place_BN.device)[:, None] if self.cos_BTF.shape[0] > 1 else 0
        cos, sin = (table[b, place_BN.long()][:, None].to(key_BGND.dtype) for table in (self.cos_BTF, self.sin_BTF))
        first, second = key_BGND[..., :half], key_BGND[..., half : 2 * half]
        turned = [first * cos - second * sin, second * cos + first * sin]
        return torch.cat([*turned, key_BGND[..., 2 * half :]], dim=-1)
