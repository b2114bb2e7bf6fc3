"""Divergence detection: stop a run that has gone wrong, and name the place.

Shapes: L layers, P trained parameters; 2 is (keys, values).
"""

import math
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from lowrank_kv.calibration.activation_moments import KEY, KEY_VALUE, VALUE
from lowrank_kv.hf.attention import TRANSFORM
from lowrank_kv.utils.errors import UserError

from .resumable_state import saved_states

_EMA_WEIGHT = 0.05  # of the newest step in the running mean of the cross-entropy, which spans about 20 steps
# What a compressor is of, and how a person would say it.
_COMPRESSED = {KEY: "keys", VALUE: "values", KEY_VALUE: "keys and values"}
_MIN_STEPS = 20  # steps before that mean is compared


class GradientNorms:
    """Records the squared norm of every trained parameter's gradient as autograd computes it on this process.

    A norm that is not finite identifies the parameter. Hooks record it before any reduction or sharding, so it means the
    same on every engine. It costs one read of each gradient.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], device: torch.device):
        self.names = list(parameters)
        self._squares_P = torch.zeros(len(parameters), device=device)
        for index, parameter in enumerate(parameters.values()):
            parameter.register_hook(self._recorder(index))

    def _recorder(self, index: int):
        def record(gradient: Tensor) -> None:
            self._squares_P[index] += gradient.detach().float().square().sum()

        return record

    def pop(self) -> Tensor:
        """The squared norms recorded since the last call, (P,) fp32."""
        squares_P, self._squares_P = self._squares_P, torch.zeros_like(self._squares_P)
        return squares_P


class DivergenceGuard:
    """Decides after the backward passes of every step whether the run continues.

    Args:
        names: of the trained parameters, in order of the layers.
        layers: indices of the compressed layers.
        max_loss_increase: nats that the averaged cross-entropy may rise above its lowest; 0 switches the check off.
        states: directory of the resumable states, which the message names.
    """

    def __init__(self, names: list[str], layers: list[int], max_loss_increase: float, states: Path):
        self.names, self.layers, self.max_loss_increase, self.states = names, layers, max_loss_increase, states
        self.steps, self.mean, self.lowest = 0, 0.0, math.inf

    def state(self) -> dict[str, float | None]:
        """The entries with which a resumed run continues exactly, ready for JSON."""
        return {"steps": self.steps, "mean": self.mean, "lowest": self.lowest if math.isfinite(self.lowest) else None}

    def load(self, state: dict[str, float | None]) -> None:
        self.steps, self.mean = state["steps"], state["mean"]
        self.lowest = math.inf if state["lowest"] is None else state["lowest"]

    def check(self, step: int, loss: float, cross_entropy: float, soft_L2: Tensor, squares_P: Tensor) -> None:
        """Check a step before the optimizer takes it.

        Args:
            step: its number, counted from 1.
            loss, cross_entropy: means over all processes.
            soft_L2: soft retain rates of the compressed layers.
            squares_P: squared gradient norms.

        Raises:
            UserError: something is not finite, or the run has diverged; the message names the step, the layer and the last
                good state.
        """
        if not math.isfinite(loss):
            raise self.stop(step, f"the loss is {loss}", self._first_in_forward(soft_L2))
        broken = [
            name for name, square in zip(self.names, squares_P.tolist(), strict=True) if not math.isfinite(square)
        ]
        if broken:
            # Backward runs from the last layer to the first, so the last broken parameter broke first.
            raise self.stop(step, "a gradient is not finite", parameter_place(broken[-1]))
        self.steps += 1
        self.mean += _EMA_WEIGHT * (cross_entropy - self.mean)
        mean = self.mean / (1 - (1 - _EMA_WEIGHT) ** self.steps)
        if self.steps >= _MIN_STEPS:
            self.lowest = min(self.lowest, mean)
            if self.max_loss_increase and mean > self.lowest + self.max_loss_increase:
                largest = self.names[int(squares_P.argmax())]
                raise self.stop(
                    step,
                    f"the run diverges: the cross-entropy averaged over about 20 steps is {mean:.2f} nats, after "
                    f"{self.lowest:.2f}",
                    f"{parameter_place(largest)}, which has the largest gradient",
                )

    def stop(self, step: int, problem: str, place: str | None) -> UserError:
        """The error that ends a run at `step`."""
        states = saved_states(self.states)
        good = f"the last good checkpoint is {states[-1]}" if states else "no checkpoint was written before"
        again = "go on with --resume" if states else "start it again"
        where = f" in {place}" if place else ""
        return UserError(
            f"training stopped at step {step}: {problem}{where}; {good}. Lower `optimizer.lr_projection` and "
            f"`optimizer.lr_gate` (and `optimizer.lr_backbone`, if it is trained), or raise `optimizer.warmup_ratio`, and "
            f"{again}"
        )

    def _first_in_forward(self, soft_L2: Tensor) -> str:
        bad = (~soft_L2.isfinite()).any(dim=1).nonzero().flatten().tolist()
        if not bad:
            return "no compressed layer, so behind the last one"
        side = "keys" if not soft_L2[bad[0], 0].isfinite() else "values"
        return f"layer {self.layers[bad[0]]} {side}, where it appears first"


def parameter_place(name: str) -> str:
    """A parameter's name as a person would say it, e.g. ``layer 3 keys, projection.weight``."""
    layer = re.search(r"\.(\d+)\.", name)
    if not layer:
        return name
    part = re.search(rf"\.{TRANSFORM}\.({'|'.join(_COMPRESSED)})\.(.+)$", name)
    rest = f" {_COMPRESSED[part.group(1)]}, {part.group(2)}" if part else f", {name[layer.end() :]}"
    return f"layer {layer.group(1)}{rest}"
