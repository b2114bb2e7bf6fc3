"""A decoded token's way through a compressed cache as operations of a graph, for models that `torch.compile` compiles.

What a cache does is not for a graph: it grows, and its kernels are compiled already. But with a graph that breaks off three
times a layer to let it be done a token takes half as long again (docs/log/compiled-decoding.md). So a graph calls two
opaque operations, one where transformers updates the cache and one for the attention over it. They find the cache layer
by number, because a graph takes tensors and outlives any one cache; in the place of the keys the first hands the second
this number, so that nothing has to remember between the two, which may be in different graphs, whose cache it was.

That a cache changes is not said of any argument. What an operation takes follows from what the one before gave, so that none
can be left out, merged or moved before another.

Shapes: B batch, H query heads, G KV heads, Q queries, T keys, D head dim, E rotary dims.
"""

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_numbers = itertools.count(1)
_numbered: WeakValueDictionary[int, "GraphHandle"] = WeakValueDictionary()


class GraphHandle:
    """An object that a graph's operation finds again by :attr:`number`, a tensor of one int64 on the CPU; a copy, and what
    pickle loads, has one of its own."""

    number: Tensor

    def register(self) -> None:
        number = next(_numbers)
        _numbered[number] = self
        self.number = torch.tensor(number, device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        return {name: held for name, held in self.__dict__.items() if name != "number"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.register()


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
    context: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    position: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """Cache new tokens.

    Args:
        layer, context: numbers of the cache layer and of what its attention module needs.
        key, value: (B, G, Q, D), keys rotated.
        cos, sin, position: of these keys' rotation, (B or 1, Q, E) and (B or 1, Q); None where the family has none.
        mask: (B, 1, Q, T) as transformers passes it, for a look at it before anything is cached.

    Returns:
        the layer's number in the keys' place: (B, G, Q, D) int64, on the CPU.
    """
    embeddings = None if cos is None else (cos, sin)
    # The graph may write over what it passes as soon as this is done, before the attention has seen it.
    states = key.clone(), value.clone()
    _numbered[context.item()].cache(_numbered[layer.item()], *states, embeddings, position, mask)
    return torch.full(key.shape, layer.item(), device="cpu")


@torch.library.register_fake(cache_in_graph)
def _(layer: Tensor, context: Tensor, key: Tensor, *_: Any) -> Tensor:
    return torch.empty(key.shape, dtype=torch.int64, device="cpu")


def is_number(key: Tensor) -> bool:
    """Whether what stands in the keys' place came from :func:`cache_in_graph`."""
    return key.dtype == torch.int64


@_operation
def attend_in_graph(
    layer: Tensor, context: Tensor, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Attention over all that is cached, the newest tokens included: (B, H, Q, D) queries → (B, Q, H, D).

    Args:
        layer: what :func:`cache_in_graph` returned.
        context: see there.
        mask: (B, 1, Q, T) as transformers passes it.
        scaling, softcap: of scores, as transformers passes them.
    """
    [number] = layer[:1, :1, :1, :1].flatten().tolist()
    scores = {"scaling": scaling, "softcap": softcap}
    return _numbered[context.item()].attend(_numbered[number], query, mask, **scores)[0].contiguous()


@torch.library.register_fake(attend_in_graph)
def _(layer: Tensor, context: Tensor, query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
