"""Objects that hold a cache's tokens as JSON and tensors, and back.

Such objects refer to one another, and to what all caches of a configuration share: bases, plans, settings. These are written
as numbers, and read as the reader's own. Only classes of this project and of transformers' caches are read back, by setting
their attributes.
"""

import copyreg
import ctypes
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowrank_kv.hf.cache.method_packages import METHOD_PACKAGES
from lowrank_kv.stores.growable_tensor import GrowingRows
from lowrank_kv.utils.errors import UserError

_MODULES = (*METHOD_PACKAGES, "transformers.cache_utils.")
_PLAIN = (bool, int, float, str, type(None))
_SEQUENCES = {"tuple": tuple, "list": list}
_ADDRESSES = "native_view"  # attribute: what compiled code has worked out about the tensors beside it


class StateWriter:
    """Writes values one after another; an object that stands in several is written once.

    Args:
        shared: what is written as its place here.
        repeats: write such an object again wherever it stands, so that a copy of it makes no difference.

    Attributes:
        tensors: name → tensor, contiguous; without repeats no two are in the same memory.
        visited: every object and tensor that was written, in order.
    """

    def __init__(self, shared: Sequence[Any] = (), *, repeats: bool = False):
        self.tensors: dict[str, Tensor] = {}
        self.visited: list[Any] = []
        self._repeats = repeats
        self._shared = {id(each): place for place, each in enumerate(shared)}
        self._places: dict[int, int] = {}  # in `visited`, by identity
        self._memory: set[int] = set()

    def write(self, value: Any) -> Any:
        """The value as JSON.

        Raises:
            UserError: it holds something that is not written, such as a function.
        """
        if isinstance(value, _PLAIN):
            return value
        if type(value) is dict:
            return {"dict": [[self.write(key), self.write(each)] for key, each in value.items()]}
        for name, kind in _SEQUENCES.items():
            if type(value) is kind:
                return {name: [self.write(each) for each in value]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": None}  # the reader has its own
        if isinstance(value, slice):
            return {"slice": [value.start, value.stop, value.step]}
        if isinstance(value, ctypes.c_int64):
            return {"count": value.value}
        if id(value) in self._shared:
            return {"shared": self._shared[id(value)]}
        if id(value) in self._places and not self._repeats:
            return {"same": self._places[id(value)]}
        if isinstance(value, Tensor):
            self._visit(value)
            return self._tensor(value)
        name = _name_of(type(value))
        make, arguments, *rest = value.__reduce_ex__(2)
        if make is type(None):  # addresses
            return None
        self._visit(value)
        if isinstance(value, GrowingRows):  # without room to grow
            make, arguments, *rest = value.clone().__reduce_ex__(2)
        return {"class": name, **self._content(type(value), make, arguments, *rest)}

    def _visit(self, value: Any) -> None:
        self._places[id(value)] = len(self.visited)
        self.visited.append(value)

    def _tensor(self, tensor: Tensor) -> dict[str, Any]:
        tensor, name = tensor.detach(), f"{len(self.tensors)}"
        is_by_columns = tensor.dim() > 1 and not tensor.is_contiguous() and tensor.mT.is_contiguous()
        kept = tensor.mT if is_by_columns else tensor.contiguous()
        memory = kept.untyped_storage().data_ptr()
        if not self._repeats and (memory in self._memory or kept.untyped_storage().nbytes() != kept.nbytes):
            kept = kept.clone()
        self._memory.add(memory)
        self.tensors[name] = kept
        return {"tensor": name} | ({"by_columns": True} if is_by_columns else {})

    def _content(self, kind: type, make: Any, arguments: tuple, state: dict[str, Any] | None = None, *more: Any) -> Any:
        """What an object holds, by what its `__reduce_ex__` says of it."""
        if make is not copyreg.__newobj__ or arguments[0] is not kind or any(more):
            raise UserError(f"a cache cannot be saved with a {kind.__module__}.{kind.__qualname__} in it")
        # What was worked out on the way is worked out again.
        kept = {name: each for name, each in (state or {}).items() if not _is_worked_out(kind, name)}
        return {
            "items": [self.write(each) for each in arguments[1:]],  # of a named tuple
            "state": [[name, self.write(each)] for name, each in kept.items()],
        }


class StateReader:
    """Reads what :class:`StateWriter` wrote, in the same order.

    Args:
        tensors: the writer's.
        shared: what stands for the writer's.
        device: of all tensors.
    """

    def __init__(self, tensors: Mapping[str, Tensor], shared: Sequence[Any], device: torch.device):
        self._tensors, self._shared, self.device = tensors, shared, device
        self._visited: list[Any] = []

    def read(self, value: Any) -> Any:
        """The value of JSON.

        Raises:
            UserError: it names a class that is no part of a cache.
        """
        if isinstance(value, _PLAIN):
            return value
        [tag, *_] = value
        content = value[tag]
        if tag == "dict":
            return {self.read(key): self.read(each) for key, each in content}
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self.read(each) for each in content)
        if tag == "dtype":
            return dtype_named(content)
        if tag == "device":
            return self.device
        if tag == "slice":
            return slice(*content)
        if tag == "count":
            return ctypes.c_int64(content)
        if tag == "shared":
            return self._shared[content]
        if tag == "same":
            return self._visited[content]
        return self._tensor(value) if tag == "tensor" else self._object(value)

    def _tensor(self, value: dict[str, Any]) -> Tensor:
        tensor = self._tensors[value["tensor"]].to(self.device)
        self._visited.append(tensor.mT if value.get("by_columns") else tensor)
        return self._visited[-1]

    def _object(self, value: dict[str, Any]) -> Any:
        kind, place = _class_named(value["class"]), len(self._visited)
        self._visited.append(None)
        self._visited[place] = found = kind.__new__(kind, *(self.read(each) for each in value["items"]))
        for name, each in value["state"]:
            found.__dict__[name] = None if name == _ADDRESSES else self.read(each)
        is_whole = getattr(kind, "is_whole", None)
        if is_whole is not None and not is_whole(found):
            raise UserError(f"a saved cache has a {kind.__name__} whose parts do not fit together; the file is damaged")
        return found


def _is_worked_out(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), functools.cached_property)


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name such as ``float32``. Raises :class:`UserError` where there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UserError(f"a saved cache names the dtype `{name}`, which torch does not have; the file is damaged")
    return found


def _name_of(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class_of(name) is not kind:
        raise UserError(f"a cache cannot be saved with a {kind.__module__}.{kind.__qualname__} in it")
    return name


def _class_named(name: str) -> type:
    found = _class_of(name)
    if found is None:
        raise UserError(f"a saved cache names the class `{name}`, which is no part of a cache; the file is damaged")
    return found


def _class_of(name: str) -> type | None:
    """A class of a module that is loaded already; None for anything else."""
    module, _, qualname = name.partition(":")
    if not f"{module}.".startswith(_MODULES) or "." in qualname:
        return None
    found = getattr(sys.modules.get(module), qualname, None)
    return found if isinstance(found, type) and found.__module__ == module else None
