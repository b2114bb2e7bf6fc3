"""Plans of bits in the place of numbers of coefficients: each class of tokens has as many bits as the loss asks.

Which class a token is in is foretold from its coefficients: as the calibration fitted it, or as training learned it.

Shapes: T tokens, C joint width, K classes of tokens, R coefficients that have bits at most, M tokens of a class.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowrank_kv.stores.bit_plan import UNCODED, WIDTHS, BitPlan
from lowrank_kv.stores.importance_gate import ImportanceGate
from lowrank_kv.stores.token_plans import MOST_CLASSES, PLACE_BYTES, TokenPlans

_CODED = tuple(width for width in WIDTHS if width != UNCODED)
_ENDS = tuple(itertools.accumulate(2**width for width in _CODED))
_GATE = ("linear", "square", "rest", "bounds")  # what tells a token's class
# Around a bound between classes a token is partly of either in training, over about so much of its score, log w.
_SOFTNESS = 0.5
_LEAST_SHARE = 1e-3  # of a class in a token, below which it counts as none


class PlannedBits(nn.Module):
    """The plans of one layer's keys or values. They are worked out before training, which changes at most what tells the
    classes of tokens apart.

    Args:
        width: C.
        learns_classes: whether `linear`, `square`, `rest` and `bounds` are trained.

    Attributes:
        bits: of each class's coefficients, falling, (K, C) uint8; 0 where one is not kept, and in classes that are not used.
        levels: the codebooks of all widths, one after another, fp32.
        linear, square, rest, leading: of the gate (:class:`lowrank_kv.stores.importance_gate.ImportanceGate`).
        bounds: between the scores of classes, (K − 1,) fp32.
        shares: of tokens in each class, (K,) fp32.
        importance: what the loss asks of each coefficient, (C,) fp32: what directions of a text's own are found by.
    """

    def __init__(self, width: int, *, learns_classes: bool = False):
        super().__init__()
        self.learns_classes = learns_classes
        self.register_buffer("bits", torch.zeros(MOST_CLASSES, width, dtype=torch.uint8))
        self.register_buffer("levels", torch.zeros(_ENDS[-1]))
        for name, size in zip(_GATE, (width, width, 3, MOST_CLASSES - 1), strict=True):
            if learns_classes:
                self.register_parameter(name, nn.Parameter(torch.zeros(size)))
            else:
                self.register_buffer(name, torch.zeros(size))
        self.register_buffer("importance", torch.zeros(width))
        self.register_buffer("leading", torch.ones((), dtype=torch.int64))
        self.register_buffer("shares", torch.zeros(MOST_CLASSES))
        self._of_bits = _Remembered()
        self._of_all = _Remembered()

    @torch.no_grad()
    def initialize(self, plan: BitPlan | TokenPlans, importance_C: Tensor) -> None:
        """Take over a plan, or one for each class, of at most C coefficients, and what these matter."""
        for tensor in self.state_dict().values():
            tensor.zero_()
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

    def fault_in(self, tensors: Mapping[str, Tensor]) -> str | None:
        """What keeps tensors of the right shapes and dtypes, finite all, from being plans; None where nothing does."""
        bits_KC, levels = tensors["bits"], tensors["levels"].split([2**width for width in _CODED])
        used = int((bits_KC[:, 0] > 0).sum())
        leading, width = int(tensors["leading"]), bits_KC.shape[1]
        if others := set(bits_KC.unique().tolist()) - {0, *WIDTHS}:
            return f"bits has {min(others)}, and a coefficient has 0 or {', '.join(map(str, WIDTHS))}"
        if bool((bits_KC[:, 1:] > bits_KC[:, :-1]).any()):
            return "bits rise within a class, and must fall"
        if not used or not bool(bits_KC[:used, 0].all()):
            return f"bits has a class without any before one that has some, or none at all: {bits_KC[:, 0].tolist()}"
        for bits, level_L in zip(_CODED, levels, strict=True):
            if bool((bits_KC == bits).any()) and bool((level_L[1:] < level_L[:-1]).any()):
                return f"levels of {bits} bits fall, and must rise"
        if not 1 <= leading <= width:
            return f"leading is {leading}, and must be from 1 to {width}"
        if bool((tensors["shares"] < 0).any()):
            return f"shares are {tensors['shares'].tolist()}, and must be zero or positive"
        return None

    @torch.no_grad()
    def set_shares(self, shares: Sequence[float]) -> None:
        """Say how tokens are divided into classes, which changes nothing but what they are expected to take."""
        self.shares[: len(shares)] = torch.tensor(shares)

    @torch.no_grad()
    def move_bounds(self, shift: float) -> None:
        """Move all bounds between classes up, or down, by a number of nats."""
        self.bounds += shift

    @property
    def plan(self) -> BitPlan | TokenPlans:
        """How a store packs rows; the same object until what it is made of changes."""
        plans = self._plans()

        def together() -> BitPlan | TokenPlans:
            return plans[0] if len(plans) == 1 else self._token_plans(plans)

        gate = [getattr(self, name) for name in _GATE]
        return self._of_all([self.bits, self.levels, self.leading, self.shares, *gate], together)

    def _plans(self) -> tuple[BitPlan, ...]:
        """Of each class that is used."""

        def of_classes() -> tuple[BitPlan, ...]:
            return tuple(self._plan_of([width for width in row if width]) for row in self.bits.tolist() if row[0])

        return self._of_bits([self.bits, self.levels], of_classes)

    def _plan_of(self, bits: list[int]) -> BitPlan:
        ends = {width: end for width, end in zip(_CODED, _ENDS, strict=True) if width in bits}
        levels = {width: self.levels[end - 2**width : end].clone() for width, end in ends.items()}
        return BitPlan(bits, levels, device=self.levels.device)

    # Without gradients: a pass that recomputes activations finds the plan made, and must save what the first pass saved.
    @torch.no_grad()
    def _token_plans(self, plans: tuple[BitPlan, ...]) -> TokenPlans:
        # Copies: a cache keeps to what it was made with.
        gate = ImportanceGate(
            linear_C=self.linear.clone(),
            square_C=self.square.clone(),
            rest_3=self.rest.clone(),
            leading=int(self.leading),
        )
        bounds_K = self._rising_bounds(len(plans)).clone()
        return TokenPlans(gate=gate, bounds_K=bounds_K, plans=plans, shares=tuple(self.shares[: len(plans)].tolist()))

    def _rising_bounds(self, classes: int) -> Tensor:
        """Those between so many classes; a class whose bounds training has let pass each other is empty."""
        return self.bounds[: classes - 1].cummax(dim=0).values

    @property
    def rate(self) -> float:
        """Bytes of a token over those of C numbers of 16 bits, where :attr:`shares` of all tokens are in each class."""
        plan = self.plan
        return plan.nbytes(plan.num_coefficients) / (2 * self.bits.shape[1])

    def forward(self, coef_BTC: Tensor, row_BTR: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of tokens as a store would give them back, (B, T, R) fp32, and twice what these tokens take as
        :attr:`rate` counts it, scalars: with gradients where classes are learned, and without.

        Gradients pass to coefficients that are kept as if nothing had been rounded (straight-through, Bengio et al. 2013,
        arXiv 1308.3432), and to the others not at all.

        Args:
            coef_BTC: all coefficients, by which a token's class is told.
            row_BTR: what is packed of each token; None for the first R of them.
        """
        plan, coef_BTC = self.plan, coef_BTC.float()
        kept_BTR = coef_BTC[..., : plan.num_coefficients] if row_BTR is None else row_BTR
        row_TR = kept_BTR.detach().flatten(0, -2)
        if isinstance(plan, BitPlan):
            rounded_TR, soft_rate = plan.rounded(row_TR), coef_BTC.new_tensor(self.rate)
            hard_rate = soft_rate
        else:
            in_classes = self._mixed if self.learns_classes and self.training else self._told_apart
            rounded_TR, keeps_TR, soft_rate, hard_rate = in_classes(plan, coef_BTC.detach().flatten(0, -2), row_TR)
            kept_BTR = kept_BTR * keeps_TR.view(kept_BTR.shape)
        rounded_BTR = rounded_TR.view(kept_BTR.shape)
        return kept_BTR + (rounded_BTR - kept_BTR.detach()), soft_rate, hard_rate

    def token_rates(self, coef_BTC: Tensor) -> Tensor:
        """What each token takes, as :attr:`rate` counts it, (B, T) fp32."""
        plan = self.plan
        if isinstance(plan, BitPlan):
            return coef_BTC.new_full(coef_BTC.shape[:-1], self.rate, dtype=torch.float32)
        size_T = plan.size_K[plan.classes(coef_BTC.float().flatten(0, -2))]
        return self.rate_of(size_T).view(coef_BTC.shape[:-1])

    def _told_apart(self, plan: TokenPlans, coef_TC: Tensor, row_TR: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(rounded rows, whether each coefficient is kept, and the rate twice), each token by the plan of its class."""
        class_T = plan.classes(coef_TC)
        rate = self.rate_of(plan.size_K[class_T].float().mean())
        return plan.rounded(row_TR, class_T), plan.keeps(class_T), rate, rate

    def _mixed(self, plan: TokenPlans, coef_TC: Tensor, row_TR: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same of tokens that are partly of each class, so that the loss says what another class would do to them; the
        share of each coefficient that is kept; and the soft and the hard rate.

        A token is at least of class k by m_k = σ((s − b_k) / τ), of its score s and the class's lower bound b_k. As the mask
        of a gate falls along the coefficients (section 3.2), so does m along the classes.
        """
        # With gradients, which the plan's own copies do not have.
        gate = ImportanceGate(linear_C=self.linear, square_C=self.square, rest_3=self.rest, leading=plan.gate.leading)
        score_T, bounds_K = gate.scores(coef_TC), self._rising_bounds(len(plan.plans))
        mask_TK = ((score_T[:, None] - bounds_K) / _SOFTNESS).sigmoid()
        share_TK = -F.pad(F.pad(mask_TK, (1, 0), value=1.0), (0, 1)).diff(dim=1)
        share_TK = share_TK * (share_TK > _LEAST_SHARE)
        share_TK = share_TK / share_TK.sum(dim=1, keepdim=True)
        rounded_TR = torch.zeros_like(row_TR)
        for k, each in enumerate(plan.plans):
            [place_M] = share_TK[:, k].nonzero(as_tuple=True)
            rounded_MR = each.rounded(row_TR[place_M, : each.num_coefficients])
            rounded_MR = F.pad(rounded_MR, (0, plan.num_coefficients - each.num_coefficients))
            rounded_TR = rounded_TR.index_add(0, place_M, share_TK[place_M, k, None] * rounded_MR)
        keeps_TR = share_TK.detach() @ plan.keeps(torch.arange(len(plan.plans), device=row_TR.device)).float()
        size_K, class_T = plan.size_K.float(), torch.bucketize(score_T.detach(), plan.bounds_K)
        return rounded_TR, keeps_TR, self.rate_of((share_TK @ size_K).mean()), self.rate_of(size_K[class_T].mean())

    def rate_of(self, size: Tensor) -> Tensor:
        """As :attr:`rate` counts it, of tokens whose rows take so many bytes, each or on average."""
        return (size + PLACE_BYTES) / (2 * self.bits.shape[1])


class _Remembered:
    """What was made of some tensors, until one of them changes."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._made: Any = None

    def __call__(self, tensors: Sequence[Tensor], make: Callable[[], Any]) -> Any:
        # By their numbers: an engine that shards parameters may gather other ones to the same place.
        known = self._tensors
        if len(known) != len(tensors) or not all(map(_are_equal, known, tensors)):
            self._made, self._tensors = make(), [tensor.detach().clone() for tensor in tensors]
        return self._made


def _are_equal(tensor: Tensor, other: Tensor) -> bool:
    return tensor.device == other.device and torch.equal(tensor, other)
