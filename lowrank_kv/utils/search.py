"""The end of a range in which something is true, found in few tries."""

from collections.abc import Callable


def last_where(holds: Callable[[int], bool], *, least: int, limit: int) -> int | None:
    """The last of the numbers from `least` to `limit` that `holds`; None where the first one does not, or there is none.

    Numbers are doubled until one does not hold, then the range between is halved. So `holds` is to be true up to some number
    and false after it. Where it turns false and true again, the number found holds and the next one does not, unless it is
    the limit.

    Args:
        least: zero or positive.
    """
    if least > limit or not holds(least):
        return None
    low, high = least, limit + 1  # which is taken not to hold
    while low < limit:
        tried = min(2 * low or 1, limit)
        if not holds(tried):
            high = tried
            break
        low = tried
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
