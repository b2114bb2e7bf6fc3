"""Plans of bits in the place of a learned gate: each class of tokens has as many bits as the loss asks.

Shapes: T tokens, C joint width, K classes of tokens, R coefficients that have bits at most.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lowrank_kv.stores.bit_plan import UNCODED, WIDTHS, BitPlan
from lowrank_kv.stores.importance_gate import ImportanceGate
from lowrank_kv.stores.token_plans import MOST_CLASSES, PLACE_BYTES, TokenPlans

_CODED = tuple(width for width in WIDTHS if width != UNCODED)
_ENDS = tuple(itertools.accumulate(2**width for width in _CODED))


class PlannedBits(nn.Module):
    """The plans of one layer's keys or values. They are worked out before training, which does not change them.

    Attributes:
        bits: of each class's coefficients, falling, (K, C) uint8; 0 where one is not kept, and in classes that are not used.
        levels: the codebooks of all widths, one after another, fp32.
        linear, square, rest, leading: of the gate (:class:`lowrank_kv.stores.importance_gate.ImportanceGate`).
        bounds: between the scores of classes, (K − 1,) fp32.
        shares: of tokens in each class, (K,) fp32.
        importance: what the loss asks of each coefficient, (C,) fp32: what directions of a text's own are found by.
    """

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("bits", torch.zeros(MOST_CLASSES, width, dtype=torch.uint8))
        self.register_buffer("levels", torch.zeros(_ENDS[-1]))
        sizes = {"linear": width, "square": width, "rest": 3, "bounds": MOST_CLASSES - 1, "importance": width}
        for name, size in sizes.items():
            self.register_buffer(name, torch.zeros(size))
        self.register_buffer("leading", torch.ones((), dtype=torch.int64))
        self.register_buffer("shares", torch.zeros(MOST_CLASSES))
        self._plans: tuple[tuple[int, int], BitPlan | TokenPlans] | None = None  # where the buffers were, what they say

    @torch.no_grad()
    def initialize(self, plan: BitPlan | TokenPlans, importance_C: Tensor) -> None:
        """Take over a plan, or one for each class, of at most C coefficients, and what these matter."""
        for buffer in self.buffers():
            buffer.zero_()
        self.leading.fill_(1)
        self.importance.copy_(importance_C)
        plans = (plan,) if isinstance(plan, BitPlan) else plan.plans
        for k, each in enumerate(plans):
            self.bits[k, : each.num_coefficients] = torch.tensor(each.bits, dtype=torch.uint8)
            for width, end in zip(_CODED, _ENDS, strict=True):
                if width in each.levels:
                    self.levels[end - 2**width : end] = each.levels[width]
        if isinstance(plan, BitPlan):
            self.shares[0] = 1
            return
        self.linear.copy_(plan.gate.linear_C)
        self.square.copy_(plan.gate.square_C)
        self.rest.copy_(plan.gate.rest_3)
        self.leading.fill_(plan.gate.leading)
        self.bounds[: len(plan.bounds_K)] = plan.bounds_K
        self.shares[: len(plans)] = torch.tensor(plan.shares)

    @torch.no_grad()
    def set_shares(self, shares: Sequence[float]) -> None:
        """Say how tokens are divided into classes, which changes nothing but what they are expected to take."""
        self.shares[: len(shares)] = torch.tensor(shares)
        self._plans = None

    @property
    def plan(self) -> BitPlan | TokenPlans:
        """How a store packs rows; the same object until the buffers change."""
        versions = (self.bits._version, self.bits.data_ptr())
        if self._plans is None or self._plans[0] != versions:
            used = [row for row in self.bits.tolist() if row[0]]
            plans = tuple(self._plan_of([width for width in row if width]) for row in used)
            self._plans = versions, plans[0] if len(plans) == 1 else self._token_plans(plans)
        return self._plans[1]

    def _plan_of(self, bits: list[int]) -> BitPlan:
        ends = {width: end for width, end in zip(_CODED, _ENDS, strict=True) if width in bits}
        return BitPlan(bits, {width: self.levels[end - 2**width : end].clone() for width, end in ends.items()})

    def _token_plans(self, plans: tuple[BitPlan, ...]) -> TokenPlans:
        # Copies: a cache keeps to what it was made with.
        gate = ImportanceGate(
            linear_C=self.linear.clone(),
            square_C=self.square.clone(),
            rest_3=self.rest.clone(),
            leading=int(self.leading),
        )
        shares = tuple(self.shares[: len(plans)].tolist())
        return TokenPlans(gate=gate, bounds_K=self.bounds[: len(plans) - 1].clone(), plans=plans, shares=shares)

    @property
    def rate(self) -> float:
        """Bytes of a token over those of C numbers of 16 bits, where :attr:`shares` of all tokens are in each class."""
        plan = self.plan
        return plan.nbytes(plan.num_coefficients) / (2 * self.bits.shape[1])

    def rounded(self, coef_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """The first R coefficients as a store would give them back, fp32, and what these tokens take as :attr:`rate` counts
        it, a scalar.

        Gradients pass to those that are kept as if nothing had been rounded (straight-through, Bengio et al. 2013,
        arXiv 1308.3432), and to the others not at all.
        """
        plan, coef_BTC = self.plan, coef_BTC.float()
        held_TC = coef_BTC.detach().flatten(0, -2)
        rank = plan.num_coefficients
        kept_BTR = coef_BTC[..., :rank]
        if isinstance(plan, BitPlan):
            rounded_TR, rate = plan.rounded(held_TC[:, :rank]), coef_BTC.new_tensor(self.rate)
        else:
            class_T = plan.classes(held_TC)
            rounded_TR = plan.rounded(held_TC, class_T)
            rate = (plan.size_K[class_T].float().mean() + PLACE_BYTES) / (2 * self.bits.shape[1])
            kept_BTR = kept_BTR * plan.keeps(class_T).view(kept_BTR.shape)
        rounded_BTR = rounded_TR.view(kept_BTR.shape)
        return kept_BTR + (rounded_BTR - kept_BTR.detach()), rate
