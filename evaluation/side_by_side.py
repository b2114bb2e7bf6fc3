"""Several caches that hold one prompt read what follows it in one batch: a sequence for each cache.

The model's own weights are multiplied once with the tokens of all of them. Only attention goes cache by cache.

Shapes: N caches, G KV heads, D head dim, Q new tokens, T tokens of a text, S of them predicted, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from lowrank_kv.hf.backends import Backend
from lowrank_kv.hf.cache.layer import CallContext, CompressedLayer
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.geometry import geometry_of

from .rebuilt_once import rebuilt_once
from .shared_prompt import LayerOfSeveral


@torch.no_grad()
def read_side_by_side(
    model: PreTrainedModel, ids_T: Tensor, caches: Sequence[Cache], *, prefix: int, step: int
) -> Tensor:
    """The logits of the predictions that :func:`evaluation.reading.read_through` scores, (N, S, V) in the model's dtype;
    each cache's are those that it has alone, but for the order of sums.

    Args:
        model: one that :func:`evaluation.shared_prompt.can_share`.
        ids_T: token ids, on the model's device.
        caches: of one sequence each, and of this model. All have read the first `prefix` tokens.
        step: tokens read at a time; at most 16 are attended as decoding attends them.
    """
    outer = LowRankCache(model, {index: _OneLayerOfEach(caches, index) for index in geometry_of(model).layers})
    parts = ids_T[prefix:].expand(len(caches), -1).split(step, dim=1)
    with rebuilt_once(caches):
        logits = [model(input_ids=part, past_key_values=outer).logits for part in parts]
    return torch.cat(logits, dim=1)[:, :-1]


class _OneLayerOfEach(LayerOfSeveral):
    """While each reads a sequence of the batch."""

    def __init__(self, caches: Sequence[Cache], index: int):
        super().__init__(caches, index)
        self._exact: list[tuple[Tensor, Tensor]] = []  # what each gives a stock attention, in the running call
        self.is_initialized, self.batch_size = True, len(caches)  # they have all read a prompt

    def append(self, key_NGQD: Tensor, value_NGQD: Tensor, context: CallContext) -> None:
        self._exact = []
        for row, member in enumerate(self._members):
            if isinstance(member, CompressedLayer):
                member.begin_call(CallContext(context.rope, _of(row, context.mask)))
            self._exact.append(member.update(key_NGQD[row : row + 1], value_NGQD[row : row + 1]))

    def attend_cached(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        outputs = []
        for row, (member, exact) in enumerate(zip(self._members, self._exact, strict=True)):
            own, seen = query[row : row + 1], _of(row, mask)
            if isinstance(member, CompressedLayer):
                outputs.append(member.attend(module, own, seen, inner, **kwargs)[0])
            else:
                outputs.append(inner(module, own, *exact, seen, **kwargs)[0])
        self._exact = []
        return torch.cat(outputs), None

    def get_seq_length(self) -> int:
        return self._members[0].get_seq_length()


def _of(row: int, mask: Tensor | None) -> Tensor | None:
    """One sequence's part of a mask, (N or 1, 1, Q, T)."""
    return mask if mask is None or len(mask) == 1 else mask[row : row + 1]
