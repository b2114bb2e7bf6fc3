"""How many bytes a cache of a plan will hold: a token, a whole sequence, and from which length on these are fewer than an
uncompressed one's.
"""

from lowrank_kv.hf.cache.windowed.own_directions import OwnDirections
from lowrank_kv.hf.cache.windowed.plan import InitialBasis, Plan, eviction_parts
from lowrank_kv.hf.cache.windowed.planned_sequence import PlannedSequence, planned_layers
from lowrank_kv.utils.config import require
from lowrank_kv.utils.search import last_where
from lowrank_kv.utils.values import check_type, whole_number

LONGEST = 2**40  # tokens of no sequence


def planned_nbytes(plan: Plan, *, prompt: int, tokens: int, itemsize: int) -> float:
    """Bytes of one unpadded sequence whose last token was decoded alone; on average where tokens have classes.

    Args:
        plan: bases, ranks and settings.
        prompt: tokens read at once at the start.
        tokens: all tokens, `prompt` included.
        itemsize: bytes of a number in the model's dtype.
    """
    return nbytes_of_layers(plan, planned_layers(plan.config, len(plan.layers), prompt=prompt, tokens=tokens), itemsize)


def planned_rate(plan: Plan, *, prompt: int, tokens: int, itemsize: int) -> float:
    """:func:`planned_nbytes` over the bytes of an uncompressed cache."""
    nbytes = planned_nbytes(plan, prompt=prompt, tokens=tokens, itemsize=itemsize)
    return nbytes / plan.geometry.full_nbytes(tokens, itemsize)


def nbytes_of_layers(plan: Plan, sequences: list[PlannedSequence], itemsize: int) -> float:
    """:func:`planned_nbytes` of what each layer holds, as :func:`planned_layers` counts it."""
    width = plan.geometry.width
    nbytes = sum(
        sum(_store_nbytes(initial, sequence, width=width, itemsize=itemsize) for initial in kv)
        + sequence.position_bytes(eviction_parts(kv))
        for sequence, kv in zip(sequences, plan.layers.values(), strict=True)
    )
    return nbytes + (plan.rotation_bytes * sequences[0].length if plan.config.rotates else 0)


def _store_nbytes(initial: InitialBasis, sequence: PlannedSequence, *, width: int, itemsize: int) -> float:
    config = sequence.config
    parts, part_width, rank = initial.vectors_PWR.shape
    rows = sequence.low_rank_capacity * initial.stored_parts
    num_bytes = rows * _row_nbytes(initial, itemsize) + sequence.full_rank_capacity * width * itemsize
    has_own = sequence.has_own_directions and initial.shared is not None and initial.holds_rows
    if has_own and initial.drops_some:
        num_bytes += OwnDirections.nbytes(len(initial.shared.weight_C), config.own_directions)
    if initial.is_compressed and config.follows_text:
        # A sketch has twice a basis's rows, the sum of deferred steps as many. Until its first step a basis is the plan's.
        if config.tracker == "frequent_directions":
            num_bases = 2
        else:
            num_bases = int(config.update == "triggered" and sequence.may_defer)
        num_bases += sequence.has_started
        num_bytes += num_bases * parts * part_width * rank * 4
    return num_bytes


def _row_nbytes(initial: InitialBasis, itemsize: int) -> float:
    """Bytes of one part's row."""
    if initial.quantization is None:
        return initial.rank * itemsize
    return initial.quantization.nbytes(initial.rank)


def token_nbytes(plan: Plan, itemsize: int) -> float:
    """Bytes that a compressed token takes in all layers; on average where tokens have classes."""
    return sum(initial.stored_parts * _row_nbytes(initial, itemsize) for kv in plan.layers.values() for initial in kv)


def checked_itemsize(itemsize: int) -> int:
    """Bytes of a number, as an int. Raises :class:`UserError` where it is no whole number of at least 1."""
    itemsize = whole_number("itemsize", itemsize)
    require(itemsize >= 1, "itemsize", itemsize, "at least 1")
    return itemsize


def break_even_tokens(plan: Plan, itemsize: int) -> int | None:
    """From how many tokens on one sequence, read as a prompt, takes fewer bytes than an uncompressed cache.

    It takes more before where the sequence has bases of its own. None where it always does.

    Raises:
        UserError: `plan` is no plan, or `itemsize` no number of bytes.
    """
    check_type("plan", plan, Plan, "a plan, such as make_plan(calibration, config)")
    itemsize = checked_itemsize(itemsize)
    saved = plan.geometry.full_nbytes(1, itemsize) - token_nbytes(plan, itemsize)
    if saved <= (plan.rotation_bytes if plan.config.rotates else 0):
        return None

    def saves_nothing(tokens: int) -> bool:
        return planned_rate(plan, prompt=tokens, tokens=tokens, itemsize=itemsize) >= 1

    last = last_where(saves_nothing, least=1, limit=LONGEST) or 0
    return None if last == LONGEST else last + 1  # none such as where all of every prompt stays at full rank


def break_even(plan: Plan, itemsize: int) -> str:
    """:func:`break_even_tokens` of a plan whose bases follow the text, in words."""
    pays = break_even_tokens(plan, itemsize)
    length = "at no length" if pays is None else f"from {pays:,} tokens on"
    return f"each sequence has bases of its own: it takes fewer bytes than uncompressed {length}"
