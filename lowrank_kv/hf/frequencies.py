"""Rotations of many tokens at once without the model's module, where compiled code can do what the module does.

Shapes: B batch, T tokens, F pairs of a rotation.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lowrank_kv.ops import native
from lowrank_kv.ops.rotary_table import RotaryTable

# Places at which a module is asked whether it rotates by place · frequency.
_PROBES = (0, 1, 2, 3, 10, 127, 1000, 4099, 32_771, 131_071)


def turns_by_frequencies(module: Callable) -> bool:
    """Whether :func:`angles` gives what a rotary module of transformers gives (found by trying it), and there is compiled
    code for it on the device of the module's frequencies."""
    frequency_F = getattr(module, "inv_freq", None)
    if not isinstance(frequency_F, Tensor) or frequency_F.dim() != 1 or not native.computes_angles(frequency_F.device):
        return False
    if frequency_F.abs().max() > math.pi / 2:
        return False
    # Whatever torch's defaults are set to.
    place_BT = torch.tensor([_PROBES], dtype=torch.int32, device="cpu")
    cos_BTE, sin_BTE = module(torch.empty(0, dtype=torch.float32, device="cpu"), place_BT.long())
    ours = angles(module, place_BT)
    pairs = [(ours.cos_BTF, cos_BTE), (ours.sin_BTF, sin_BTE)]
    return all(
        theirs.shape[-1] == 2 * our.shape[-1] and torch.allclose(our.repeat(1, 1, 2), theirs.float(), rtol=0, atol=1e-6)
        for our, theirs in pairs
    )


def angles(module: Callable, place_BT: Tensor) -> RotaryTable:
    """Scaled cos and sin by which a module turns the pairs at int32 places."""
    return native.angles(place_BT, module.inv_freq, getattr(module, "attention_scaling", 1.0))
