"""What a trained compressor does on text it was not trained on.

Shapes: N blocks, T tokens of a block.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from dynakv.objective import retain_rates


@torch.no_grad()
def measure(model: PreTrainedModel, blocks_NT: Tensor) -> dict[str, float]:
    """Hard retain rate and perplexity over blocks, through the uncached hard mask.

    Returns:
        ``hard_rate`` and ``perplexity``, averaged over all tokens of all blocks.
    """
    was_training = model.training
    model.eval()
    losses, rates = [], []
    for block_T in blocks_NT:
        ids = block_T[None].to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits
        losses.append(float(F.cross_entropy(logits[0, :-1].float(), ids[0, 1:])))
        rates.append(retain_rates(model).hard)
    model.train(was_training)
    return {"hard_rate": sum(rates) / len(rates), "perplexity": math.exp(sum(losses) / len(losses))}
