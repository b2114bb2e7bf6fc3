"""What callers give a function: of the type that it takes, and numbers of numpy and torch as Python's own."""

import json
import operator
from typing import Any

from lowrank_kv.utils.errors import UserError


def check_type(name: str, value: Any, kind: Any, remedy: str) -> None:
    """Raise :class:`UserError` unless an argument is of a type.

    Args:
        name: of the argument.
        kind: a type, or several of them, as `isinstance` takes them.
        remedy: what the argument must be, in words.
    """
    if not isinstance(value, kind):
        told = value if isinstance(value, str | int | float | None) else type(value).__name__
        raise UserError(f"`{name}` must be {remedy}; got {told!r}")


def unboxed(value: Any) -> Any:
    """A single number or text of numpy, or of a tensor without dimensions, as Python's own; anything else as it is."""
    is_boxed = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    return value.item() if is_boxed else value


def whole_number(name: str, value: Any) -> int:
    """The value as an int: of Python, of numpy, or of a tensor with one element.

    Raises:
        UserError: it is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise UserError(f"`{name}` must be a whole number; got {value!r}") from None


def number(name: str, value: Any) -> float:
    """The value as a float: of Python, of numpy, or of a tensor without dimensions.

    Raises:
        UserError: it is none.
    """
    found = unboxed(value)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise UserError(f"`{name}` must be a number; got {value!r}")
    return float(found)


def plain_json(name: str, value: Any) -> Any:
    """The value as it is read back from JSON, where numbers of numpy and torch are Python's own.

    Raises:
        UserError: JSON cannot hold it.
    """
    try:
        return json.loads(json.dumps(value, default=_unboxed_or_refused))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"`{name}` must hold what JSON can: texts, numbers, lists and mappings with texts as keys; got {error}"
        ) from error


def _unboxed_or_refused(value: Any) -> Any:
    found = unboxed(value)
    if found is value:
        raise TypeError(f"a {type(value).__name__}")
    return found
