"""One reading of a prompt fills several caches.

Where a prompt's own attention is exact, all caches are given the same keys and values, and the model computes the same
whatever they keep of them. A comparison of many methods then reads each prompt once instead of once for each.

Shapes: B batch, G KV heads, D head dim, Q tokens of the prompt.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from lowrank_kv.hf.backends import Backend
from lowrank_kv.hf.cache.layer import CallContext, CompressedLayer
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.geometry import geometry_of


def can_share(model: PreTrainedModel) -> bool:
    """Whether every layer of the model can be compressed; layers of other kinds keep caches of their own."""
    config = model.config.get_text_config(decoder=True)
    return len(geometry_of(model).layers) == config.num_hidden_layers


@torch.no_grad()
def read_prompt_once(model: PreTrainedModel, ids_1Q: Tensor, caches: Sequence[Cache]) -> Tensor:
    """Read a prompt into several fresh caches, each of which is then what the model would have made of it alone.

    Args:
        model: one that :func:`can_share`.
        ids_1Q: token ids, on the model's device.
        caches: fresh, of this model.

    Returns:
        The logits of the token after the prompt, (1, 1, vocabulary).

    Raises:
        RuntimeError: a cache gives the prompt's attention other keys or values than the model's; it must read alone.
    """
    layers = {index: _SharedLayer(caches, index) for index in geometry_of(model).layers}
    return model(input_ids=ids_1Q, past_key_values=LowRankCache(model, layers), logits_to_keep=1).logits


class LayerOfSeveral(CompressedLayer):
    """One layer of several caches, which reads for them. It holds nothing itself."""

    rotates = False  # each cache has its own record of rotations

    def __init__(self, caches: Sequence[Cache], index: int):
        super().__init__()
        self._members = [cache.layers[index] for cache in caches]

    def start(self) -> None:
        """Nothing: the members start themselves."""

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def truncate(self, length: int) -> None:
        """Nothing: nothing is held."""

    # The cache of these layers lives for one reading, so that nobody asks for what follows.

    def select(self, rows: list[int]) -> None:
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError

    def copy_state(self, memo: dict) -> None:
        raise NotImplementedError


class _SharedLayer(LayerOfSeveral):
    """While they read one prompt."""

    def __init__(self, caches: Sequence[Cache], index: int):
        super().__init__(caches, index)
        self._num_read = 0

    def append(self, key_BGQD: Tensor, value_BGQD: Tensor, context: CallContext) -> None:
        self._num_read = key_BGQD.shape[2]
        for member in self._members:
            if isinstance(member, CompressedLayer):
                member.begin_call(context)
                member.update(key_BGQD, value_BGQD)
            else:
                _check_exact(member.update(key_BGQD, value_BGQD), (key_BGQD, value_BGQD))

    def attend_cached(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        states = self.stored.states
        output = inner(module, query, *states, mask, **kwargs)

        def attended(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple:
            _check_exact((key, value), states)
            return output

        for member in self._members:
            if isinstance(member, CompressedLayer):
                member.attend(module, query, mask, Backend(attended, inner.weighs_scores), **kwargs)
        return output

    def get_seq_length(self) -> int:
        return self._num_read


def _check_exact(given: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor]) -> None:
    if not all(map(torch.equal, given, stored)):
        raise RuntimeError("a cache that does not attend to a prompt's exact states cannot share its reading")
