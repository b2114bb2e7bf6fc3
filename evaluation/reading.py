"""A model reads text through a cache: the one way in which every measurement does.

Shapes: T tokens, S of them predicted and scored, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache

from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.loading import check_length
from lowrank_kv.utils.config import require

from .peers.quantized_cache import quantized_tensors


class Reading(NamedTuple):
    """How a window is read: a prompt of `prefix` tokens (0 for one pass), then `step` tokens at a time."""

    prefix: int
    step: int


def check_split(model: PreTrainedModel, tokens: int, prefix: int) -> None:
    """Raise :class:`UserError` unless a text of `tokens` is a prompt of `prefix` and something after it."""
    check_length(model, tokens, "prefix + tokens")
    require(0 < prefix < tokens, "prefix", prefix, f"between 0 and the text's {tokens} tokens")


@torch.no_grad()
def read_through(model: PreTrainedModel, ids_T: Tensor, cache: Cache, *, prefix: int, step: int) -> Tensor:
    """The predictions that are scored, log-probabilities, (S, V) fp32; attention sees keys and values as the cache gives
    them back.

    Without a prefix a text is read, and each of its tokens but the first predicted, in one pass. With one, that many tokens
    are the prompt. The rest is read `step` tokens at a time, as generation reads it, and each of its tokens but the first is
    predicted: that one's prediction is the prompt's, which is exact in caches that compress after it.

    Args:
        ids_T: token ids, on the model's device.
        cache: fresh, or one that has read the prompt (:func:`evaluation.shared_prompt.read_prompt_once`).
        prefix: length of the prompt; 0 for none.
        step: tokens read at a time after it; at most 16 are attended as decoding attends them.
    """
    ids_1T = ids_T[None]
    if prefix and not cache.get_seq_length():
        model(input_ids=ids_1T[:, :prefix], past_key_values=cache, logits_to_keep=1)
    parts = ids_1T[:, prefix:].split(step, dim=1) if prefix else [ids_1T]
    logits = [model(input_ids=part, past_key_values=cache).logits[0] for part in parts]
    return torch.cat(logits)[:-1].float().log_softmax(-1)


@torch.no_grad()
def read_uncompressed(model: PreTrainedModel, ids_T: Tensor, *, prefix: int) -> Tensor:
    """The same predictions of the model in one pass without a cache, (S, V) fp32."""
    count = len(ids_T) - prefix
    logits_SV = model(input_ids=ids_T[None], use_cache=False, logits_to_keep=count).logits[0, :-1]
    return logits_SV.float().log_softmax(-1)


def full_cache(model: PreTrainedModel) -> Cache:
    """A stock uncompressed cache."""
    return DynamicCache(config=model.config)


def cache_bytes(cache: Cache, layers: Sequence[int]) -> int:
    """Bytes of the tensors a cache holds for its tokens in the layers that can be compressed."""
    if isinstance(cache, LowRankCache):
        return cache.nbytes
    if isinstance(cache, QuantizedCache):
        return sum(tensor.nbytes for tensor in quantized_tensors(cache))
    return sum(tensor.nbytes for index in layers for tensor in (cache.layers[index].keys, cache.layers[index].values))
