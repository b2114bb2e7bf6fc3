"""Plain form of the gated append, in fp64.

Shapes: B batch, C joint width.
"""

from torch import Tensor

from lowrank_kv.bases.hard_rank import hard_rank
from lowrank_kv.stores.paged import PagedStore


def gated_append(
    state_BC: Tensor, weight_CX: Tensor, bias_C: Tensor, store: PagedStore, *, threshold: float, granularity: int
) -> None:
    """x̃ = x U; r from softmax(x̃ W + b) and the threshold; the first r of x̃ into the store.

    Arguments as in :func:`lowrank_kv.ops.gated_append.triton.gated_append`. Reserves by itself, and waits for the device.
    """
    coef_BC, logit_BC = (state_BC.double() @ weight_CX.double()).chunk(2, dim=1)
    cumulative_BC = (logit_BC + bias_C.double()).softmax(dim=-1).cumsum(dim=-1)
    rank_B1 = hard_rank(cumulative_BC, threshold, granularity)[:, None]
    store.append(coef_BC.to(state_BC.dtype)[:, None], rank_B1)
