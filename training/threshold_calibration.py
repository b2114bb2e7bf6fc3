"""Settle the threshold τ after training, so that the hard rate is the one asked for.

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
_FAR_OFF = 0.01


@torch.no_grad()
def calibrate_threshold(
    model: PreTrainedModel, batches: list[Batch], target: float, *, floor: float = 0.0
) -> dict[str, float]:
    """Set the τ of all compressors to the least one whose mean hard rate over the blocks is at most `target`.

    The dual update of α brings the rate near the target while the learning rates fade; what is left is a point or two,
    which τ takes up without touching a weight. τ is searched in [0.02, 0.5] in steps of 0.001, by what each of them would
    keep in one pass: ranks are added up as the pass goes, and no gate's output is held.

    A layer reads what earlier layers kept at the τ of the pass, so that the rate at another τ is off by a little; a second
    pass, at the τ found in the first, takes that up.

    Args:
        model: attached; its uncached hard-mask path is run.
        batches: text of the training distribution that was not trained on.
        target: hard retain rate.
        floor: τ goes no further than to where the keys or values of a layer fall below this hard rate.

    Returns:
        ``threshold`` and the ``hard_rate`` it gives on the text. At a bound of the search, or held up by the floor, that
        is not the target, and a warning says so.
    """
    sides = dynakv.token_compressors(model)
    threshold_K = torch.arange(LOWEST, HIGHEST + _STEP / 2, _STEP)
    for _ in range(2):
        rate_SK = _rates(model, batches, threshold_K)
        over_K = rate_SK.mean(dim=0) > target
        # A higher threshold keeps less: the first one that keeps no more than the target, or the last.
        index = min(int(over_K.sum()), len(threshold_K) - 1)
        if floor:
            # A layer that training left below the floor binds nothing: no τ of the search could lift it.
            bound_S = (rate_SK >= floor).sum(dim=1)
            reachable = bound_S[bound_S > 0]
            index = min(index, int(reachable.min()) - 1) if len(reachable) else index
        threshold = round(float(threshold_K[index]), 4)
        for side in sides:
            side.config = dataclasses.replace(side.config, threshold=threshold)
    rate = float(rate_SK.mean(dim=0)[index])
    if abs(rate - target) > _FAR_OFF:
        warnings.warn(
            f"settling left the hard rate at {rate:.3f}, for a target of {target:g}: no threshold in [{LOWEST}, {HIGHEST}]"
            f"{' above the floor' if floor else ''} brings it nearer; train for longer, or from another `rate.alpha`",
            stacklevel=2,
        )
    return {"threshold": threshold, "hard_rate": rate}


def _rates(model: PreTrainedModel, batches: list[Batch], threshold_K: Tensor) -> Tensor:
    """Mean hard rate of every side at every threshold, (S, K) fp64, from one pass at the present one."""
    sides = dynakv.token_compressors(model)
    granularity, width = sides[0].config.granularity, sides[0].width
    kept = {side.gate: torch.zeros(len(threshold_K), dtype=torch.float64) for side in sides}

    def count(gate: nn.Module, arguments: tuple, cumulative_BTC: Tensor) -> None:
        candidates = threshold_K.to(cumulative_BTC.device).expand(*cumulative_BTC.shape[:-1], -1).contiguous()
        rank_BTK = width - torch.searchsorted(cumulative_BTC.contiguous(), candidates, right=True)
        kept[gate] += rounded(rank_BTK, granularity, width).sum(dim=(0, 1)).double().cpu()

    run_uncached(model, batches, dict.fromkeys(kept, count))
    return torch.stack(list(kept.values())) / (sum(batch.ids_BT.numel() for batch in batches) * width)
