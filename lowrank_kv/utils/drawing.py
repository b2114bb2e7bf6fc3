"""What may be asked of random draws, wherever they are asked for: a seed, and the temperature at which tokens are drawn."""

import math

from lowrank_kv.utils.config import require

# Far below what changes a text; a logit over a much smaller one is no fp32 number, and a text could not be drawn.
LEAST_TEMPERATURE = 1e-6


def check_seed(seed: int, key: str) -> None:
    """Raise :class:`UserError` for a seed that some generator of Python, torch or NumPy does not take."""
    require(0 <= seed < 2**31, key, seed, "at least 0 and below 2³¹")


def check_temperature(temperature: float, key: str, *, greedy: str) -> None:
    """Raise :class:`UserError` for a temperature at which nothing can be drawn; `greedy` says how to ask for the likeliest
    tokens instead."""
    is_possible = LEAST_TEMPERATURE <= temperature < math.inf  # not NaN either
    require(is_possible, key, temperature, f"at least {LEAST_TEMPERATURE:g} and finite; {greedy}")
