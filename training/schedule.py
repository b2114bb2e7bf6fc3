"""The learning-rate schedule."""

import math


def learning_rate_factor(step: int, steps: int, *, warmup: float, final: float) -> float:
    """Linear rise over the first `warmup` share of the run, then a cosine from 1 down to `final`.

    Args:
        step: 0 for the first step.
        steps: of the whole run.
    """
    rise = round(warmup * steps)
    if step < rise:
        return (step + 1) / rise
    progress = (step - rise) / max(1, steps - rise)
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
