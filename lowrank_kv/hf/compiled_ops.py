"""How a decoded token reaches a compressed cache in a model that `torch.compile` compiles: as two operations of its graph.

A graph cannot hold the work of a cache: a cache grows, and its kernels are compiled already. Breaking the graph off three
times a layer makes a token take half as long again (docs/log/compiled-decoding.md). A graph therefore calls two opaque
operations: :func:`cache_in_graph` where the attention module updates its cache, :func:`attend_in_graph` in place of its
attention. They find the cache layer and the attention module by number, because a graph takes tensors and outlives caches.

No argument is declared as changed. Instead each operation takes a result of the one before it, so that torch can neither
leave one out nor merge or reorder them.

Shapes: B batch, H query heads, G KV heads, Q queries, T keys, D head dim, E rotary dims.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lowrank_kv.hf.call_checks import objection_to_call, objection_to_keywords, refuse
from lowrank_kv.ops.gradients import without_gradients

_numbers = itertools.count(1)
_numbered: WeakValueDictionary[int, "GraphHandle"] = WeakValueDictionary()


class GraphHandle:
    """An object that a graph's operations find by :attr:`number`, an int64 tensor () on the CPU. A copy, and an object that
    pickle loads, has a number of its own."""

    number: Tensor

    def __new__(cls, *args: Any, **kwargs: Any) -> "GraphHandle":
        self = super().__new__(cls)
        number = next(_numbers)
        _numbered[number] = self
        self.number = torch.tensor(number, device="cpu")
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "number"}


def outside_graphs(function: Callable) -> Callable:
    """`torch.compiler.disable` for functions of every decoded token: uncompiled models do not pay for it."""
    outside = torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (outside if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call


def _operation(function: Callable[..., Tensor]) -> torch._ops.OpOverload:
    """The function as an operation of its name. `torch.library.custom_op` would do, at 8 µs a call for 3.5: it looks at
    every argument and result, for gradients and shared memory, 60 times a token in a model of 30 layers."""
    name = f"lowrank_kv::{function.__name__}"
    schema = torch.library.infer_schema(function, mutates_args=())
    # A CUDA graph would replay its kernels alone, on the tokens of the step it was taken in.
    torch.library.define(name, schema, tags=(torch.Tag.cudagraph_unsafe,))
    torch.library.impl(name, "CompositeExplicitAutograd", function)
    return getattr(torch.ops.lowrank_kv, function.__name__).default


@_operation
def cache_in_graph(
    layer: Tensor,
    prepared: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    position: Tensor | None,
    mask: Tensor | None,
    objection: str | None,
) -> Tensor:
    """Append new tokens to a cache layer.

    Args:
        layer, prepared: numbers of the cache layer and of the `PreparedAttention` of the module.
        key, value: (B, G, Q, D), keys rotated.
        cos, sin, position: the rotation of these keys, (B or 1, Q, E) and (B or 1, Q); None where the family has none.
        mask: (B, 1, Q, T) as transformers passes it.
        objection: why the call is refused; None where it is not.

    Returns:
        the layer's number.
    """
    refuse(objection)
    cache_layer, module = _numbered[layer.item()], _numbered[prepared.item()]
    cache_layer.check_owner(module.identity)
    embeddings = None if cos is None else (cos, sin)
    cache_layer.begin_call(module.call_context(embeddings, position, mask))
    # The graph may overwrite its tensors when this returns, before the attention has read them.
    cache_layer.update(key.clone(), value.clone())
    return layer.clone()


@torch.library.register_fake(cache_in_graph)
def _(layer: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(layer)


@_operation
def attend_in_graph(
    layer: Tensor,
    prepared: Tensor,
    query: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    s_aux: Tensor | None,
    objection: str | None,
) -> Tensor:
    """Attention over all cached tokens, the newest included: (B, H, Q, D) queries → (B, Q, H, D).

    Args:
        layer: the result of :func:`cache_in_graph`.
        prepared, mask, objection: as there.
        scaling, softcap, s_aux: of scores, as transformers passes them.
    """
    refuse(objection)
    cache_layer, module = _numbered[layer.item()], _numbered[prepared.item()]
    return module.attend(cache_layer, query, mask, scaling=scaling, softcap=softcap, s_aux=s_aux)[0].contiguous()


@torch.library.register_fake(attend_in_graph)
def _(layer: Tensor, prepared: Tensor, query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)


class GraphCall:
    """One call of an attention module in a graph. The module gets this in place of its cache and, by way of its keyword
    arguments, so does the attention function: both call operations of the graph.

    Args:
        cache: the cache that the module was called with.
        layer, prepared: the cache layer and the `PreparedAttention` of the module.
        kwargs: the module's keyword arguments.
    """

    def __init__(self, cache: Any, layer: GraphHandle, prepared: GraphHandle, kwargs: dict[str, Any]):
        self.cache, self.layer, self.prepared = cache, layer.number, prepared.number
        cos, sin = kwargs.get("position_embeddings") or (None, None)
        self.inputs = cos, sin, kwargs.get("position_ids"), kwargs.get("attention_mask")
        self.objection = objection_to_call(prepared.module, kwargs)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.layer = cache_in_graph(self.layer, self.prepared, key_states, value_states, *self.inputs, self.objection)
        return key_states, value_states

    def attend(
        self, prepared: GraphHandle, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        options = kwargs["scaling"], kwargs.get("softcap"), kwargs.get("s_aux")
        objection = objection_to_keywords(prepared.module, kwargs)
        output = attend_in_graph(self.layer, self.prepared, query, mask, *options, objection)
        return without_gradients(output, query, key, value, kwargs.get("s_aux")), None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)
