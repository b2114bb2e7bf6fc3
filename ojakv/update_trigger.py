"""When a step of a basis is worth its price.

Shapes: P parts, N rows, W width of a part, R rank.
"""

from torch import Tensor

# A residual below this is rounding.
SMALLEST_RESIDUAL = 1e-6


class UpdateTrigger:
    """Puts steps off until their regret exceeds a threshold.

    Regret is the sum, over the batches of rows since the last step, of how much larger the residual is that the present
    basis leaves of a batch than the residual that a step would have left, in times of the latter.

    Args:
        threshold: the regret at which a step is worth its price.

    Attributes:
        regret: so far.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.regret = 0.0

    def is_worth_a_step(self, rows_PNW: Tensor, old_PWR: Tensor, new_PWR: Tensor) -> bool:
        """Whether to step from the old basis to the new one, with the regret of these rows added to the earlier ones'."""
        residual = residual_of(rows_PNW, new_PWR)
        self.regret += max(0.0, residual_of(rows_PNW, old_PWR) / max(residual, SMALLEST_RESIDUAL) - 1)
        return self.regret > self.threshold

    def reset(self) -> None:
        """A step is made."""
        self.regret = 0.0


def residual_of(rows_PNW: Tensor, basis_PWR: Tensor) -> float:
    """The share of the rows' energy outside of a basis (RER)."""
    energy = rows_PNW.square().sum()
    return float(1 - (rows_PNW @ basis_PWR).square().sum() / energy) if energy > 0 else 0.0
