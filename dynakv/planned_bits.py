"""A plan of bits in the place of a gate: every token keeps the same coefficients, each in as many bits as the loss asks.

Shapes: B batch, T tokens, C joint width, R coefficients that have bits.
"""

import itertools

import torch
from torch import Tensor, nn

from lowrank_kv.stores.bit_plan import UNCODED, WIDTHS, BitPlan

_CODED = tuple(width for width in WIDTHS if width != UNCODED)
_ENDS = tuple(itertools.accumulate(2**width for width in _CODED))


class PlannedBits(nn.Module):
    """The plan of one layer's keys or values. It is worked out before training, which does not change it.

    Attributes:
        bits: of each coefficient, falling, (C,) uint8; 0 where it is not kept.
        levels: the codebooks of all widths, one after another, fp32.
    """

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("bits", torch.zeros(width, dtype=torch.uint8))
        self.register_buffer("levels", torch.zeros(_ENDS[-1]))
        self._plan: tuple[tuple[int, int], BitPlan] | None = None  # versions of the buffers, and what they say

    @torch.no_grad()
    def initialize(self, plan: BitPlan) -> None:
        """Take over a plan of at most C coefficients."""
        self.bits.zero_()
        self.bits[: plan.num_coefficients] = torch.tensor(plan.bits, dtype=torch.uint8)
        self.levels.zero_()
        for width, end in zip(_CODED, _ENDS, strict=True):
            if width in plan.levels:
                self.levels[end - 2**width : end] = plan.levels[width]

    @property
    def plan(self) -> BitPlan:
        """The plan as a store packs rows by it; the same object until the buffers change."""
        versions = (self.bits._version, self.bits.data_ptr())
        if self._plan is None or self._plan[0] != versions:
            bits = [width for width in self.bits.tolist() if width]
            levels = {
                width: self.levels[end - 2**width : end].clone()
                for width, end in zip(_CODED, _ENDS, strict=True)
                if width in bits
            }
            self._plan = versions, BitPlan(bits, levels)
        return self._plan[1]

    @property
    def rate(self) -> float:
        """Bytes of a token over those of C numbers of 16 bits."""
        plan = self.plan
        return plan.row_bytes(plan.num_coefficients) / (2 * len(self.bits))

    def rounded(self, coef_BTR: Tensor) -> Tensor:
        """The coefficients as a store would give them back, fp32. Gradients pass as if nothing had been rounded
        (straight-through, Bengio et al. 2013, arXiv 1308.3432)."""
        coef_BTR = coef_BTR.float()
        held_BTR = coef_BTR.detach()
        return coef_BTR + (self.plan.rounded(held_BTR) - held_BTR)
