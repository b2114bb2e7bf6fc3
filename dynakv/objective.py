"""What DynaKV training minimizes, and how a target retain rate is held (section 3.3)."""

import dataclasses
import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynakv.layer_compressor import LayerCompressor
from dynakv.model_compressors import compressors


@dataclasses.dataclass
class RetainRates:
    """Retain rates of one pass, per layer.

    Attributes:
        soft_L2: mean soft mask of each layer's (keys, values); carries gradients.
        hard_L2: what the threshold keeps, after rounding.
    """

    soft_L2: Tensor
    hard_L2: Tensor

    @property
    def soft(self) -> Tensor:
        return self.soft_L2.mean()

    @property
    def hard(self) -> float:
        return float(self.hard_L2.mean())


class RateRecorder:
    """Context that records the retain rates of an uncached pass, as auxiliary losses of mixture-of-experts models are.

        with RateRecorder(model) as recorder:
            loss = model(ids, labels=ids).loss
        objective(loss, recorder.rates(), alpha).backward()

    Retain rates are outputs of the compressors, and forward hooks record them. An engine that gathers a module's parameters
    when the backward pass reaches the module's outputs (ZeRO-3) therefore gathers them for the rates, too. The second
    forward pass of recomputed activations runs in the backward pass, outside of the context, and is not recorded.

    Args:
        model: with compressors.

    Raises:
        UserError: the model has no compressors.
    """

    def __init__(self, model: PreTrainedModel):
        self._layers = list(compressors(model).values())
        self._recorded: dict[LayerCompressor, tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> "RateRecorder":
        self._hooks = [layer.register_forward_hook(self._record) for layer in self._layers]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, layer: LayerCompressor, arguments: tuple, outputs: tuple[Tensor, ...]) -> None:
        *_, soft_2, hard_2 = outputs
        self._recorded[layer] = soft_2, hard_2

    def rates(self) -> RetainRates:
        """The rates of the latest pass, in order of the layers, on the first layer's device."""
        soft, hard = zip(*(self._recorded[layer] for layer in self._layers), strict=True)
        device = soft[0].device
        return RetainRates(
            soft_L2=torch.stack([soft_2.to(device) for soft_2 in soft]),
            hard_L2=torch.stack([hard_2.to(device) for hard_2 in hard]),
        )


def objective(task: Tensor, rates: RetainRates, alpha: float, *, floor: float = 0.0, key_cost: float = 1.0) -> Tensor:
    """L = CE + α R² (equation 9), R the mean of the soft mask over tokens, layers, keys and values.

    Args:
        task: CE, or what stands for it.
        rates: of the pass.
        alpha: α, the price of keeping.
        floor: hard rate below which no layer's keys or values are pushed (beyond the paper): there the price turns round,
            with the same slope, so that keeping more is what pays.
        key_cost: how much dearer keeping is in keys than in values (beyond the paper, where it is 1): R is the mean weighed
            so.
    """
    soft_L2 = rates.soft_L2
    if floor:
        # The slope of α R² with regard to each layer's rate, of which only the sign is changed.
        soft_L2 = torch.where(rates.hard_L2 < floor, -soft_L2 + 2 * soft_L2.detach(), soft_L2)
    cost_2 = soft_L2.new_tensor([key_cost, 1.0])
    return task + alpha * (soft_L2 * cost_2 / cost_2.mean()).mean().square()


# Of α over where it started: e²⁰ is half a billion.
_LARGEST_EXPONENT = 20.0


class RateController:
    """Holds a target hard retain rate by a dual update of α.

    α is the price of the constraint "hard rate ≤ goal", so it rises while the rate is above the goal and falls while it is
    below: α = α₀ · exp(P e + I Σe) with e the rate less the goal. The goal comes down linearly from the first rate seen
    (nearly 1 for a run that starts from a PCA, less for one that trains on) to the target over the first `ramp` of the
    run, and does not go up again where a run is resumed with more steps. Gates answer a change of price only after many
    steps, so a pure integral (P = 0, plain dual ascent) swings by orders of magnitude; the proportional term answers at once
    and lets the integral be slow.
    Without a target α stays what it was (the paper).

    Args:
        start: α₀.
        target: hard retain rate to end at, in (0, 1], or None.
        gain: P; the integral's gain I is a fortieth of it, per step.
        ramp: share of the run after which the goal is the target.
        alpha, sum, first, way: where a run stands that goes on; with `start` they are what :meth:`state` said of it.
    """

    def __init__(
        self,
        start: float,
        *,
        target: float | None,
        gain: float,
        ramp: float,
        alpha: float | None = None,
        sum: float = 0.0,
        first: float | None = None,
        way: float = 0.0,
    ):
        self.start, self.target, self.gain, self.ramp = start, target, gain, ramp
        self.alpha = start if alpha is None else alpha
        self.sum, self.first, self.way = sum, first, way

    def update(self, hard_rate: float, progress: float) -> None:
        """One step, `progress` in [0, 1] through the run."""
        if self.target is None:
            return
        if self.first is None:
            self.first = hard_rate
        self.way = max(self.way, min(1.0, progress / self.ramp) if self.ramp else 1.0)
        goal = self.first + (self.target - self.first) * self.way
        error = hard_rate - goal
        self.sum += error / 40
        # A rate that cannot be brought to its goal would go on adding up for ever.
        exponent = self.gain * (error + self.sum)
        if abs(exponent) > _LARGEST_EXPONENT:
            self.sum -= error / 40
            exponent = math.copysign(_LARGEST_EXPONENT, exponent)
        self.alpha = self.start * math.exp(exponent)

    def state(self) -> dict[str, float | None]:
        """What a resumed run needs to go on exactly."""
        return {"start": self.start, "alpha": self.alpha, "sum": self.sum, "first": self.first, "way": self.way}
