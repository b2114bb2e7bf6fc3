"""How many bytes a cache will hold, and the rate at which it holds a given share."""

import dataclasses
import math

from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.stores.growable_tensor import grown
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError
from ojakv.basis_plan import InitialBasis, Plan, eviction_parts, make_plan
from ojakv.config import OjaKVConfig

# Halvings of the range of rates.
_STEPS = 12


def planned_rate(plan: Plan, *, prompt: int, tokens: int, itemsize: int) -> float:
    """Bytes over those of an uncompressed cache, for one unpadded sequence whose last token was decoded alone.

    Args:
        plan: bases, ranks and settings.
        prompt: tokens read at once at the start.
        tokens: all tokens, `prompt` included.
        itemsize: bytes of a number in the model's dtype.
    """
    config = plan.config
    # The newest token is held, but for a prompt's.
    settled = tokens if tokens == prompt or config.compresses_tokens_alone else tokens - 1
    if tokens < config.min_length:
        staying, low = tokens, 0
    elif config.keep_prompt_full_rank:
        staying, low = prompt, _full_periods(settled - prompt - config.recent_window, config)
    else:
        staying = min(config.num_sink_tokens, tokens)
        # What is compressed at once: a prompt, or all there is when the sequence is long enough.
        first = max(prompt, config.min_length)
        candidates = max(0, first - staying - config.recent_window)
        waited = settled - first if candidates else settled - staying - config.recent_window
        low = candidates + _full_periods(waited, config)
        kept = round(config.full_rank_ratio * candidates) if first == prompt else 0
        staying, low = staying + kept, low - kept
    # When a period's tokens leave, room is made for as many again.
    room = max(staying + config.recent_window + config.full_period, tokens - low) if low else grown(prompt, tokens)
    evicted = 0
    if config.eviction.is_on:
        seen_low = max(0, prompt - staying - config.recent_window)
        evicted = seen_low - min(seen_low, max(0, config.eviction.count(prompt) - (prompt - seen_low)))
        low -= evicted
    if config.update_period == 1:
        low = grown(prompt - evicted, low)
    positions = 4 * room
    held = sum(
        _side_bytes(side, config, low=low, whole=room, itemsize=itemsize, width=plan.geometry.width)
        for pair in plan.layers.values()
        for side in pair
    )
    held += len(plan.layers) * positions
    if evicted:
        held += len(plan.layers) * 4 * low * eviction_parts(next(iter(plan.layers.values())))
    if config.rotates:
        held += 4 * tokens
    return held / plan.geometry.full_nbytes(tokens, itemsize)


def _full_periods(tokens: int, config: OjaKVConfig) -> int:
    return max(0, tokens) // config.update_period * config.update_period


def _side_bytes(side: InitialBasis, config: OjaKVConfig, *, low: int, whole: int, itemsize: int, width: int) -> int:
    parts, part_width, rank = side.vectors_PWR.shape
    quantization = config.quantization if side.is_compressed else None
    row = rank * itemsize if quantization is None else quantization.nbytes(rank)
    held = low * parts * row + whole * width * itemsize
    if side.is_compressed and config.tracker != "fixed":
        # A sketch has two bases' worth of rows, a sum of deferred steps one. Until its first step a basis is the plan's.
        bases = 2 if config.tracker == "frequent_directions" else int(config.update == "triggered" and low > 0)
        bases += low > 0
        held += bases * parts * part_width * rank * 4
    return held


def plan_for_bytes(
    calibration: Calibration, config: OjaKVConfig, share: float, *, prompt: int, tokens: int, itemsize: int
) -> Plan:
    """`config` at the highest rate whose cache takes at most `share` of the uncompressed bytes.

    Ranks by energy know no rate; they are then that rate's share of every width.

    Raises:
        UserError: a number out of range, or what does not depend on the rate (tokens at full rank) already takes more.
    """
    require(0 < share < math.inf, "share", share, "positive; 0.3 is three tenths of the bytes")
    require(tokens >= 1, "tokens", tokens, "at least 1")
    require(0 <= prompt <= tokens, "prompt", prompt, f"between 0 and `tokens` ({tokens})")
    config = dataclasses.replace(config, ranks="fraction" if config.ranks == "energy" else config.ranks)

    def planned(rate: float) -> tuple[Plan, float]:
        plan = make_plan(calibration, dataclasses.replace(config, rate=rate))
        return plan, planned_rate(plan, prompt=prompt, tokens=tokens, itemsize=itemsize)

    geometry = calibration.geometry
    narrowest = geometry.head_dim if config.layout == "per_head" else geometry.width
    low, high = min(1.0, config.rank_multiple / narrowest), 1.0
    best, least = planned(low)
    if least > share:
        raise UserError(
            f"no rate brings this cache to {share:.3f} of the uncompressed bytes at {tokens} tokens; keep fewer tokens at "
            f"full rank, or compare at a longer context"
        )
    for _ in range(_STEPS):
        middle = (low + high) / 2
        plan, taken = planned(middle)
        if taken <= share:
            best, low = plan, middle
        else:
            high = middle
    return best
