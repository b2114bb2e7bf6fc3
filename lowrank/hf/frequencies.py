"""Rotations of many tokens at once without the model's module, where compiled code can do what the module does.

Shapes: B batch, T tokens, F pairs of a rotation.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from lowrank.ops import native

# Places at which a module is asked whether it rotates by place · frequency.
_PROBES = (0, 1, 2, 3, 10, 127, 1000, 4099, 32_771, 131_071)


@dataclasses.dataclass(frozen=True)
class Frequencies:
    """What a rotary module turns by: radians a token of each pair, and the factor on cos and sin."""

    frequency_F: Tensor
    scaling: float

    @classmethod
    def of(cls, module: Callable) -> "Frequencies | None":
        """Those of a module of transformers; None where it has none that compiled code on its device can use, or does
        anything else with them (found by trying it)."""
        frequency_F = getattr(module, "inv_freq", None)
        if not isinstance(frequency_F, Tensor) or frequency_F.dim() != 1 or not native.rotates(frequency_F.device):
            return None
        found = cls(frequency_F, getattr(module, "attention_scaling", 1.0))
        place_BT = torch.tensor([_PROBES], dtype=torch.int32)
        cos_BTE, sin_BTE = module(torch.empty(0), place_BT.long())
        theirs = torch.complex(cos_BTE.float(), sin_BTE.float())
        ours = found.angles(place_BT).repeat(1, 1, 2)
        return found if ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=0, atol=1e-6) else None

    def angles(self, place_BT: Tensor) -> Tensor:
        """Scaled cos + i·sin at int32 places, (B, T, F) complex64."""
        return native.angles(place_BT, self.frequency_F, self.scaling)
