"""How much the loss asks of a token, foretold from its own coefficients.

A few tokens are read by many and decide most of what rounding costs; which ones they are can be told from their keys and
values. What is foretold is the logarithm of w_t, the cost of coding token t as all others are coded.

Shapes: N tokens, C width.
"""

import dataclasses

import torch
from torch import Tensor

from lowrank_kv.utils.config import require

# A square counts for at most so much, in units of its token's mean square: one outlier would decide alone.
LARGEST_SQUARE = 9.0
LEAST_SCALE = 2.0**-16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportanceGate:
    """log w_t ≈ a·u + b·u² + c log s² + d (log s²)² + e, with s² the mean square of the token's first coefficients and u all
    of them over s.

    Attributes:
        linear_C, square_C: a and b, fp32.
        rest_3: c, d and e, fp32.
        leading: how many coefficients s² is the mean square of, in 1..C.
    """

    linear_C: Tensor
    square_C: Tensor
    rest_3: Tensor
    leading: int

    def check(self) -> "ImportanceGate":
        """This gate, where `leading` is in its range; else compiled code would read beyond a row.

        It is not checked where a gate is made: sharded training makes some whose weights are elsewhere.

        Raises:
            UserError: it is out of its range.
        """
        width = len(self.linear_C)
        require(1 <= self.leading <= width, "leading", self.leading, f"from 1 to {width}, the number of coefficients")
        return self

    def scores(self, coef_NC: Tensor) -> Tensor:
        """log w_t as foretold, (…, N) fp32, from coefficients in order of importance, (…, N, C)."""
        unit_NC, square_NC, log_N = features_of(coef_NC.float(), self.leading)
        c, d, e = self.rest_3.unbind()
        return unit_NC @ self.linear_C + square_NC @ self.square_C + c * log_N + d * log_N.square() + e

    def to(self, device: torch.device) -> "ImportanceGate":
        moved = (tensor.to(device) for tensor in (self.linear_C, self.square_C, self.rest_3))
        return ImportanceGate(**dict(zip(("linear_C", "square_C", "rest_3"), moved, strict=True)), leading=self.leading)


def features_of(coef_NC: Tensor, leading: int) -> tuple[Tensor, Tensor, Tensor]:
    """(coefficients over their token's size, their squares with a bound, the logarithm of the size's square)."""
    energy_N = coef_NC[..., :leading].square().mean(dim=-1).clamp(min=LEAST_SCALE**2)
    unit_NC = coef_NC / energy_N.sqrt()[..., None]
    return unit_NC, unit_NC.square().clamp(max=LARGEST_SQUARE), energy_N.log()
