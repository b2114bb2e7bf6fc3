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
from transformers import Cache, DynamicCache, PreTrainedModel

from lowrank.hf.cache import LowRankCache
from lowrank.hf.geometry import geometry_of


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


def cache_bytes(cache: Cache, layers: Sequence[int]) -> int:
    """Bytes of the tensors a cache holds for its tokens in the layers that can be compressed."""
    if isinstance(cache, LowRankCache):
        return cache.nbytes
    return sum(tensor.nbytes for index in layers for tensor in (cache.layers[index].keys, cache.layers[index].values))


@torch.no_grad()
def score(
    model: PreTrainedModel, blocks_NT: Tensor, make_cache: Callable[[], Cache], *, description: str = "scoring"
) -> Score:
    """Read every block in one pass into a fresh cache; attention sees keys and values as the cache gives them back."""
    geometry = geometry_of(model)
    losses, held, full = [], 0, 0
    with tqdm(total=blocks_NT.numel(), unit="tok", desc=description, leave=False) as bar:
        for block_T in blocks_NT:
            ids = block_T[None].to(model.device)
            cache = make_cache()
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            losses.append(float(F.cross_entropy(logits[0, :-1].float(), ids[0, 1:])))
            held += cache_bytes(cache, geometry.layers)
            full += geometry.full_nbytes(ids.shape[1], model.dtype.itemsize)
            bar.update(ids.shape[1])
    return Score(perplexity=math.exp(sum(losses) / len(losses)), cache_bytes=held, full_bytes=full)


def full_cache(model: PreTrainedModel) -> Cache:
    """A stock uncompressed cache."""
    return DynamicCache(config=model.config)
