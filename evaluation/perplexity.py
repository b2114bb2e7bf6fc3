"""Perplexity of a model reading text through a cache, and the bytes that cache held.

Shapes: N blocks, T tokens of a block.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache

from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.hf.loading import check_length
from lowrank_kv.utils.config import require

from .peers.quantized_cache import quantized_tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """One method on one text.

    Attributes:
        perplexity: exp of the mean loss over all predicted tokens.
        cache_bytes, full_bytes: held by the cache, and by an uncompressed one, after each block, summed over blocks.
    """

    perplexity: float
    cache_bytes: int
    full_bytes: int

    @property
    def rate(self) -> float:
        return self.cache_bytes / self.full_bytes


def check_split(model: PreTrainedModel, tokens: int, prefix: int) -> None:
    """Raise :class:`UserError` unless a text of `tokens` is a prompt of `prefix` and something after it."""
    check_length(model, tokens, "prefix + tokens")
    require(0 < prefix < tokens, "prefix", prefix, f"between 0 and the text's {tokens} tokens")


def cache_bytes(cache: Cache, layers: Sequence[int]) -> int:
    """Bytes of the tensors a cache holds for its tokens in the layers that can be compressed."""
    if isinstance(cache, LowRankCache):
        return cache.nbytes
    if isinstance(cache, QuantizedCache):
        return sum(tensor.nbytes for tensor in quantized_tensors(cache))
    return sum(tensor.nbytes for index in layers for tensor in (cache.layers[index].keys, cache.layers[index].values))


@torch.no_grad()
def score(
    model: PreTrainedModel,
    blocks_NT: Tensor,
    make_cache: Callable[[], Cache],
    *,
    prefix: int = 0,
    step: int = MAX_DECODE_QUERIES,
    description: str = "scoring",
) -> Score:
    """Read every block into a fresh cache; attention sees keys and values as the cache gives them back.

    Without a prefix a block is read, and every prediction scored, in one pass. With one, that many tokens are the prompt,
    and only the predictions of what follows are scored, read `step` tokens at a time as generation reads them: this is
    what a cache that compresses after the prompt, or between steps, must be judged by.

    Args:
        blocks_NT: token ids.
        make_cache: makes a fresh cache.
        prefix: length of the prompt, below T.
        step: tokens read at a time after it; at most 16 are attended as decoding attends them.
    """
    geometry = geometry_of(model)
    losses, held, full = [], 0, 0
    sizes = [blocks_NT.shape[1]] if not prefix else [prefix, *_sizes(blocks_NT.shape[1] - prefix, step)]
    with tqdm(total=blocks_NT.numel(), unit="tok", desc=description, leave=False) as bar:
        for block_T in blocks_NT:
            ids = block_T[None].to(model.device)
            cache, logits = make_cache(), []
            for part in ids.split(sizes, dim=1):
                keep = 1 if prefix and not logits else 0  # of a prompt only the last prediction is scored
                logits.append(model(input_ids=part, past_key_values=cache, logits_to_keep=keep).logits[0].float())
                bar.update(part.shape[1])
            scored = torch.cat(logits)[:-1]
            losses.append(float(F.cross_entropy(scored, ids[0, -len(scored) :])))
            held += cache_bytes(cache, geometry.layers)
            full += geometry.full_nbytes(ids.shape[1], model.dtype.itemsize)
    return Score(perplexity=math.exp(sum(losses) / len(losses)), cache_bytes=held, full_bytes=full)


def _sizes(total: int, step: int) -> list[int]:
    return [min(step, total - start) for start in range(0, total, step)]


def full_cache(model: PreTrainedModel) -> Cache:
    """A stock uncompressed cache."""
    return DynamicCache(config=model.config)
