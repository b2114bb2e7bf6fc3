"""Calibrate the threshold τ after training, so that the hard rate meets its target.

Shapes: B batch, T tokens, C joint width, S compressed sides (keys and values of every layer), K candidates for τ.
"""

import dataclasses
import warnings

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import dynakv
from lowrank_kv.bases.hard_rank import rounded

from .data import Batch
from .validation import run_uncached

# Further from the 0.1 that training used, another α is the honest remedy.
LOWEST, HIGHEST = 0.02, 0.5
_STEP = 0.001
FAR_OFF = 0.01  # of a target, from which a rate is no longer near it


@torch.no_grad()
def calibrate_threshold(
    model: PreTrainedModel, batches: list[Batch], target: float, *, floor: float = 0.0
) -> dict[str, float]:
    """Set the τ of all compressors to the lowest one whose mean hard rate over the blocks is at most `target`.

    The dual update of α ends within a point or two of the target; τ closes the rest without changing a weight. The search
    covers [0.02, 0.5] in steps of 0.001: one pass adds up the ranks that each candidate would keep, and keeps no gate's
    output.

    A layer's input depends on what earlier layers keep at the τ of the pass, so the rate at another τ is slightly off; a
    second pass, at the τ that the first one found, corrects it.

    Args:
        model: attached; its uncached hard-mask path is run.
        batches: text of the training distribution that was not trained on.
        target: hard retain rate.
        floor: τ stops rising before the keys or values of any layer fall below this hard rate.

    Returns:
        ``threshold`` and its ``hard_rate`` on the text. Where a bound of the search or the floor keeps the rate from the
        target, a warning says so.
    """
    sides = dynakv.token_compressors(model)
    threshold_K = torch.arange(LOWEST, HIGHEST + _STEP / 2, _STEP)
    for _ in range(2):
        rate_SK = _rates(model, batches, threshold_K)
        over_K = rate_SK.mean(dim=0) > target
        # A higher threshold keeps less: the first one that keeps no more than the target, or the last.
        index = min(int(over_K.sum()), len(threshold_K) - 1)
        if floor:
            # A layer below the floor at every candidate does not count: no τ of the search could lift it.
            bound_S = (rate_SK >= floor).sum(dim=1)
            reachable = bound_S[bound_S > 0]
            index = min(index, int(reachable.min()) - 1) if len(reachable) else index
        threshold = round(float(threshold_K[index]), 4)
        for side in sides:
            side.config = dataclasses.replace(side.config, threshold=threshold)
    rate = float(rate_SK.mean(dim=0)[index])
    if abs(rate - target) > FAR_OFF:
        warnings.warn(
            f"the calibrated threshold leaves the hard rate at {rate:.3f}, for a target of {target:g}: no threshold in "
            f"[{LOWEST}, {HIGHEST}]"
            f"{' above the floor' if floor else ''} brings it nearer; train for longer, or from another `rate.alpha`",
            stacklevel=2,
        )
    return {"threshold": threshold, "hard_rate": rate}


def _rates(model: PreTrainedModel, batches: list[Batch], threshold_K: Tensor) -> Tensor:
    """Mean hard rate of every side at every threshold, (S, K) fp64, from one pass at the present threshold."""
    sides = dynakv.token_compressors(model)
    granularity, width = sides[0].config.granularity, sides[0].width
    kept = {side.gate: torch.zeros(len(threshold_K), dtype=torch.float64) for side in sides}

    def add_ranks(gate: nn.Module, arguments: tuple, cumulative_BTC: Tensor) -> None:
        candidates = threshold_K.to(cumulative_BTC.device).expand(*cumulative_BTC.shape[:-1], -1).contiguous()
        rank_BTK = width - torch.searchsorted(cumulative_BTC.contiguous(), candidates, right=True)
        kept[gate] += rounded(rank_BTK, granularity, width).sum(dim=(0, 1)).double().cpu()

    run_uncached(model, batches, dict.fromkeys(kept, add_ranks))
    return torch.stack(list(kept.values())) / (sum(batch.ids_BT.numel() for batch in batches) * width)
