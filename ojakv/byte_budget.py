"""The highest rate at which a cache keeps within a share of the bytes, or a budget."""

import dataclasses
import math
from collections.abc import Callable

from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.cache.windowed.plan import Plan
from lowrank_kv.hf.cache.windowed.planned_sequence import planned_layers
from lowrank_kv.hf.geometry import layer_groups
from lowrank_kv.utils.budget import Budget
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.values import check_type, number, whole_number
from ojakv.basis_plan import check_arguments, make_plan, part_shape
from ojakv.config import OjaKVConfig
from ojakv.planned_bytes import checked_itemsize, nbytes_of_layers, token_nbytes

# Rates that are tried at most. Bytes of plans of bits grow evenly with the rate, and a plan takes seconds to make: there the
# search interpolates, and ends so near below the limit. Narrow models have bytes in steps: it halves the range at times.
_STEPS, _NEAR, _HALVES_EVERY = 12, 1e-3, 3


def plan_for_bytes(
    calibration: Calibration, config: OjaKVConfig, share: float, *, prompt: int, tokens: int, itemsize: int
) -> Plan:
    """`config` at the highest rate whose cache takes at most `share` of the uncompressed bytes.

    Where tokens have classes, the bytes are those of a text whose tokens are divided as the calibration's.

    Ranks by energy do not depend on a rate; they are replaced by the same share of every width.

    Args:
        calibration: made on the model that the cache will serve.
        config: the settings; their rate is ignored.
        share: of the bytes of an uncompressed cache.
        prompt: tokens of the prompt, which come first.
        tokens: the whole text, the prompt included.
        itemsize: bytes of a number in the model's dtype.

    Raises:
        UserError: an argument is of another type, a number is out of range, or tokens at full rank take more than the share
            at any rate.
    """
    check_arguments(calibration, config)
    share, itemsize = number("share", share), checked_itemsize(itemsize)
    prompt, tokens = whole_number("prompt", prompt), whole_number("tokens", tokens)
    require(0 < share < math.inf, "share", share, "positive; 0.3 is three tenths of the bytes")
    require(tokens >= 1, "tokens", tokens, "at least 1")
    require(0 <= prompt <= tokens, "prompt", prompt, f"between 0 and `tokens` ({tokens})")
    nbytes = share * calibration.geometry.full_nbytes(tokens, itemsize)
    plan = _plan_within(calibration, config, nbytes, prompt=prompt, tokens=tokens, itemsize=itemsize)
    if plan is None:
        raise UserError(
            f"no rate brings this cache to {share:.3f} of the uncompressed bytes at {tokens} tokens; keep fewer tokens at "
            f"full rank, or compare at a longer context"
        )
    return plan


def plan_for_budget(calibration: Calibration, config: OjaKVConfig, budget: Budget, *, itemsize: int) -> Plan:
    """`config` at the highest rate whose cache keeps within a budget: with everything that one sequence of the budget's
    tokens holds, read as one prompt, or, where the budget is of each token, what a compressed token takes.

    Args:
        calibration: made on the model that the cache will serve.
        config: the settings; their rate is ignored.
        budget: of one sequence, or of each token.
        itemsize: bytes of a number in the model's dtype.

    Raises:
        UserError: an argument is of another type, or no rate keeps within the budget.
    """
    check_arguments(calibration, config)
    check_type("budget", budget, Budget, "a budget, such as Budget.parse('4096 B/token')")
    itemsize = checked_itemsize(itemsize)
    if budget.tokens is None:
        what, remedy = "each token", "one coefficient of each layer takes more; give more bytes"
        plan = _largest_plan(calibration, config, lambda plan: token_nbytes(plan, itemsize), budget.nbytes)
    else:
        what, remedy = f"{budget.tokens:,} tokens", "give more bytes, or keep fewer tokens at full rank"
        text = {"prompt": budget.tokens, "tokens": budget.tokens}
        plan = _plan_within(calibration, config, budget.nbytes, **text, itemsize=itemsize)
    if plan is None:
        raise UserError(f"no rate keeps within the `budget` of {budget.nbytes:,.0f} bytes for {what}; {remedy}")
    return plan


def _plan_within(
    calibration: Calibration, config: OjaKVConfig, nbytes: float, *, prompt: int, tokens: int, itemsize: int
) -> Plan | None:
    """The plan of the highest rate whose cache of a text takes at most so many bytes; None where no rate's does."""
    # The counts do not depend on the rate.
    sequences = planned_layers(config, len(calibration.geometry.layers), prompt=prompt, tokens=tokens)
    return _largest_plan(calibration, config, lambda plan: nbytes_of_layers(plan, sequences, itemsize), nbytes)


def _largest_plan(
    calibration: Calibration, config: OjaKVConfig, measure: Callable[[Plan], float], limit: float
) -> Plan | None:
    """The plan of the highest rate whose measure is at most the limit; None where the lowest rate's is above it."""
    config = dataclasses.replace(config, ranks="fraction" if config.ranks == "energy" else config.ranks)
    geometry = calibration.geometry
    _, narrowest = part_shape(geometry, config)
    if groups := layer_groups(geometry.layers, config.joint_layers):
        narrowest = 2 * min(map(len, groups)) * geometry.width
    # One coefficient of each row; where tokens have classes, what says where a row is takes less than another.
    least = config.rank_multiple / narrowest * (2 if config.token_classes > 1 else 1)
    low, high = min(1.0, least), 1.0

    def tried(rate: float) -> tuple[Plan, float]:
        plan = make_plan(calibration, dataclasses.replace(config, rate=rate))
        return plan, measure(plan)

    best, at_low = tried(low)
    if at_low > limit:
        return None
    top, at_high = tried(high)
    if at_high <= limit:
        return top
    interpolates = config.has_plan
    for step in range(_STEPS):
        middle = (low + high) / 2
        if interpolates:
            if at_high <= at_low or at_low >= limit * (1 - _NEAR):
                break
            if (step + 1) % _HALVES_EVERY:
                share = (limit * (1 - _NEAR / 2) - at_low) / (at_high - at_low)
                middle = low + (high - low) * min(share, 1.0)
        plan, taken = tried(middle)
        if taken <= limit:
            best, low, at_low = plan, middle, taken
        else:
            high, at_high = middle, taken
    return best
