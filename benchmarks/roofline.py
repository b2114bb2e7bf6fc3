"""What this machine can do at most, and what a model asks of it."""

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from benchmarks.harness import interleaved_ms
from lowrank_kv.hf.cache.layer import CompressedLayer
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.utils.flops import multiplied_weights


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written in a second by a copy far larger than any cache of the processor."""
    source = torch.rand((2**31 if device.type == "cuda" else 2**27) // 4, device=device)
    target = torch.empty_like(source)
    ms = interleaved_ms({"copy": lambda: target.copy_(source)}, repeats=10, warmup=2)["copy"]
    return 2 * source.nbytes / ms * 1e3


def held_tensors(cache: Cache) -> list[Tensor]:
    """Whatever a cache holds of its tokens, in compressed layers and in others."""
    held = [tensor for _, tensor in cache.tensors_by_kind()] if isinstance(cache, LowRankCache) else []
    native = [layer for layer in cache.layers if not isinstance(layer, CompressedLayer)]
    return held + [tensor for layer in native for tensor in (layer.keys, layer.values)]


def cache_bytes(cache: Cache) -> int:
    """Bytes of :func:`held_tensors`."""
    return sum(tensor.nbytes for tensor in held_tensors(cache))


def read_bytes(cache: Cache) -> int:
    """The same without what a decoded token does not read: pages that are free."""
    pages = getattr(cache, "pages", None)
    return cache_bytes(cache) - (0 if pages is None else pages.free_nbytes())


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a decoded token is multiplied with, each read once."""
    return sum(weight.nbytes for weight in multiplied_weights(model))


def prompt_flops(model: PreTrainedModel, length: int) -> float:
    """Operations of an uncompressed forward pass over a prompt of `length` tokens, of which the last alone has logits."""
    head = model.get_output_embeddings().weight
    body = sum(weight.numel() for weight in multiplied_weights(model) if weight is not head)
    config = model.config.get_text_config(decoder=True)
    # Scores and sums of values, each over half the square on average.
    attention = 2 * length**2 * config.num_attention_heads * geometry_of(model).head_dim * config.num_hidden_layers
    return 2.0 * (body * length + head.numel()) + attention
