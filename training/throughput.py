"""How fast and how large a run is: model FLOPs, what the device can do, and peak memory.

Shapes: T tokens of a sequence.
"""

import resource
import sys
import time

import torch
from transformers import PreTrainedModel

import dynakv
from lowrank_kv.hf.geometry import geometry_of


def model_flops(model: PreTrainedModel, length: int) -> float:
    """Floating-point operations of one token's forward and backward pass, without what is merely recomputed.

    Two for each weight forward; two for the gradient of its input; two more for its own where it is trained; causal
    attention reads T/2 keys and values on average. Inverting U is left out: it does not grow with the tokens.

    Args:
        model: with what is trained marked so; attached, or a stock one.
        length: T.
    """
    geometry = geometry_of(model)
    config = model.config.get_text_config(decoder=True)
    products = sum(_size(p)[0] * (6 if p.requires_grad else 4) for p in multiplied_weights(model))
    for side in dynakv.token_compressors(model) if dynakv.is_attached(model) else []:
        if side.config.inverse != "decoupled":
            products += 6 * side.width**2  # V, which is no parameter of its own
    attention = 6 * length * config.num_attention_heads * geometry.head_dim * config.num_hidden_layers
    return float(products + attention)


def multiplied_weights(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The weights that a token's states are multiplied with, each once."""
    # The table of input embeddings is looked up, not multiplied with, unless it is the output's as well.
    looked_up = {model.get_input_embeddings().weight} - {model.get_output_embeddings().weight}
    return [p for p in model.parameters() if _size(p)[1] >= 2 and not any(p is table for table in looked_up)]


def _size(parameter: torch.nn.Parameter) -> tuple[int, int]:
    """(numbers, dimensions); ZeRO-3 leaves an empty stand-in for a parameter that lies elsewhere."""
    if hasattr(parameter, "ds_shape"):
        return parameter.ds_numel, len(parameter.ds_shape)
    return parameter.numel(), parameter.dim()


@torch.no_grad()
def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of the best of some large square products, which stands for the device's peak."""
    size = 8192 if device.type == "cuda" else 1536
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(5):
        _synchronise(device)
        start = time.perf_counter()
        a @ b
        _synchronise(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def peak_memory(device: torch.device) -> int:
    """The most bytes held so far: of CUDA's allocator, or resident of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
