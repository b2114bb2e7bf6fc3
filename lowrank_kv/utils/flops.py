"""How many operations weights stand for, and how many a device does."""

import time

import torch
from transformers import PreTrainedModel


def multiplied_weights(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The weights that a token's states are multiplied with, each once."""
    # The table of input embeddings is looked up, not multiplied with, unless it is the output's as well.
    looked_up = {model.get_input_embeddings().weight} - {model.get_output_embeddings().weight}
    return [p for p in model.parameters() if size_of(p)[1] >= 2 and not any(p is table for table in looked_up)]


def size_of(parameter: torch.nn.Parameter) -> tuple[int, int]:
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
        _synchronize(device)
        start = time.perf_counter()
        a @ b
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
