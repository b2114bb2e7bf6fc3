"""Passes over text as inference computes it, without a cache, for what is to be learned from single modules."""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from lowrank_kv.utils.eval_mode import evaluating
from training.data import Batch


@torch.no_grad()
def run_uncached(model: PreTrainedModel, batches: list[Batch], hooks: Mapping[nn.Module, Callable]) -> None:
    """Run the model's uncached path, hard masks included, over all blocks.

    Args:
        model: attached.
        hooks: of some of its modules, called as forward hooks are: (module, arguments, output).
    """
    registered = [module.register_forward_hook(hook) for module, hook in hooks.items()]
    try:
        with evaluating(model):
            for batch in batches:
                model.base_model(**batch.to(model.device).inputs, use_cache=False)
    finally:
        for hook in registered:
            hook.remove()
