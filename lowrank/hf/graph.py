"""A decoded token's way through a compressed cache as one operation of a graph, for models that `torch.compile` compiles.

What a cache does is not for a graph: it grows, and its kernels are compiled already. But a graph that breaks off three times
a layer to let it be done costs more than compiling wins. So a graph calls one opaque operation for all that a layer's cache
does with a token, and finds the layer by number, because it takes tensors and outlives any one cache.

Shapes: B batch, H query heads, G KV heads, Q queries, T keys, D head dim, E rotary dims.
"""

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_numbers = itertools.count(1)
_numbered: WeakValueDictionary[int, "Numbered"] = WeakValueDictionary()


class Numbered:
    """An object that a graph's operation finds again by :attr:`number`, a tensor of one int64 on the CPU; a copy, and what
    pickle loads, has one of its own."""

    number: Tensor

    def take_number(self) -> None:
        number = next(_numbers)
        _numbered[number] = self
        self.number = torch.tensor(number, device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        return {name: held for name, held in self.__dict__.items() if name != "number"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.take_number()


# A CUDA graph would replay its kernels alone, on the tokens of the step it was taken in.
@torch.library.custom_op("adaptive_kv::attend", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def attend_in_graph(
    layer: Tensor,
    context: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    position: Tensor | None,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Cache new tokens and attend over all, the newest included: (B, H, Q, D) queries → (B, Q, H, D).

    That a cache changes is not said of any argument. A graph has one call for each layer, and every layer's arguments follow
    from what the layer before gave, so that none can be left out, merged or moved before another.

    Args:
        layer, context: numbers of the cache layer and of what its attention module needs.
        key, value: (B, G, Q, D), keys rotated.
        cos, sin, position: of these keys' rotation, (B or 1, Q, E) and (B or 1, Q); None where the family has none.
        mask: (B, 1, Q, T) as transformers passes it.
        scaling, softcap: of scores, as transformers passes them.
    """
    embeddings = None if cos is None else (cos, sin)
    states = query, key, value
    return _numbered[context.item()].step(
        _numbered[layer.item()], states, embeddings, position, mask, scaling=scaling, softcap=softcap
    )


@attend_in_graph.register_fake
def _(layer: Tensor, context: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    batch, heads, queries, _dim = query.shape
    return query.new_empty(batch, queries, heads, value.shape[3])
