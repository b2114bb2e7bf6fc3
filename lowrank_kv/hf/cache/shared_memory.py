"""How many bytes all caches of one configuration hold together.

Bases and compressors are objects that refer to tensors, and to what was made of these since: casts, layouts for attention.
All of them are found by following the references.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lowrank_kv.hf.cache.method_packages import METHOD_PACKAGES


def nbytes_within(roots: Iterable[Any]) -> int:
    """Bytes of all tensors that these objects refer to, memory that several share once."""
    sizes: dict[int, int] = {}  # by the address of the memory
    seen: set[int] = set()
    left = list(roots)
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, tuple | list):
            left += each
        elif isinstance(each, nn.Module) or type(each).__module__.startswith(METHOD_PACKAGES):
            left += getattr(each, "__dict__", {}).values()
    return sum(sizes.values())
