"""Linear layers of a model in bf16 on a processor that torch has no bf16 products for.

Without AVX-512, torch multiplies matrices of bf16 in a plain loop: reading 16 tokens takes three times, a prompt nearly five
times as long as in fp32. The products of two numbers of bf16 are exact in fp32, where any processor adds them up, too, and
the sum is rounded to bf16 once. So what is measured stays a model in bf16.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowrank_kv.hf.loading import load_model, multiplies_slowly


def load_measured(name: str, *, dtype: str, device: str | torch.device | None = None) -> PreTrainedModel:
    """:func:`lowrank_kv.hf.loading.load_model`, for a model only read from; it multiplies in fp32 where bf16 is slow."""
    model = load_model(name, dtype=dtype, device=device)
    if multiplies_slowly(model.dtype, model.device):
        multiply_in_fp32(model)
    return model


def multiply_in_fp32(model: PreTrainedModel) -> None:
    """Let every linear layer multiply in fp32 what it has, and is given, in bf16, and round the sums.

    Args:
        model: only read from here on: its weights are held in fp32, too, and would not change with it.
    """
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.bfloat16:
            bias = None if module.bias is None else module.bias.detach().float()
            module.forward = functools.partial(_linear, module.weight.detach().float(), bias)


def _linear(weight: Tensor, bias: Tensor | None, states: Tensor) -> Tensor:
    return F.linear(states.float(), weight, bias).to(states.dtype)
