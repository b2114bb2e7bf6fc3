"""Changes of several objects that are made together, or not at all."""

import collections
from collections.abc import Sequence
from typing import Any

# (object, its new attributes)
Changes = Sequence[tuple[object, dict[str, Any]]]


def make_changes(changes: Changes) -> None:
    """Set attributes of several objects, all of them or none: Python looks for interrupts between steps of its own, and
    where it calls a property, and this is one step without a call."""
    attributes, new = [vars(each) for each, _ in changes], [new for _, new in changes]
    collections.deque(map(dict.update, attributes, new), maxlen=0)
