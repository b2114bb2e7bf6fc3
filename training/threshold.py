"""Settle the threshold τ after training, so that the hard rate is the one asked for.

Shapes: B batch, T tokens, C joint width.
"""

import dataclasses

import torch
from torch import Tensor
from transformers import PreTrainedModel

import dynakv
from lowrank.ranks import hard_rank

# Further from the 0.1 that training used, another α is the honest remedy.
LOWEST, HIGHEST = 0.02, 0.5


@torch.no_grad()
def settle_threshold(model: PreTrainedModel, blocks_NT: Tensor, target: float) -> dict[str, float]:
    """Set the τ of all compressors to the least one whose mean hard rate over the blocks is at most `target`.

    The dual update of α brings the rate near the target while the learning rates fade; what is left is a point or two,
    which τ takes up without touching a weight. τ is searched in [0.02, 0.5], on the gates' output of one pass.

    Args:
        model: attached; its uncached hard-mask path is run.
        blocks_NT: token ids of the training distribution that were not trained on.
        target: hard retain rate.

    Returns:
        ``threshold`` and the ``hard_rate`` it gives on the blocks; at a bound of the search that is not the target.
    """
    sides = [side for layer in dynakv.compressors(model).values() for side in (layer.key, layer.value)]
    outputs: list[Tensor] = []
    hooks = [side.gate.register_forward_hook(lambda gate, args, output: outputs.append(output.cpu())) for side in sides]
    was_training = model.training
    model.eval()
    try:
        for block_T in blocks_NT:
            model.base_model(input_ids=block_T[None].to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    settings = sides[0].config

    def rate(threshold: float) -> float:
        kept = sum(int(hard_rank(cumulative, threshold, settings.granularity).sum()) for cumulative in outputs)
        return kept / sum(cumulative.numel() for cumulative in outputs)

    low, high = LOWEST, HIGHEST
    for _ in range(20):
        middle = (low + high) / 2
        # A higher threshold keeps less.
        low, high = (middle, high) if rate(middle) > target else (low, middle)
    for side in sides:
        side.config = dataclasses.replace(settings, threshold=round(high, 4))
    return {"threshold": round(high, 4), "hard_rate": rate(round(high, 4))}
