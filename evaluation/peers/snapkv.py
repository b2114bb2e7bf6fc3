"""SnapKV: each head keeps the tokens that the latest queries look at (arXiv 2404.14469, section 4).

The paper thins a prompt once and keeps all that is generated, which in the end takes any number of bytes. Here the choice is
made again after every 32 decoded tokens, by their queries, so that what is held stays within its share of the text.

Shapes: G KV heads, J query heads of one, Q queries, N tokens held, D head dim, H = G·J.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.eviction import top_scores

from .peer import MakeCache, TextLength
from .whole_tokens import Rule, WholeTokens, whole_tokens_maker

SNAPKV = "snapkv"
WINDOW, KERNEL = 32, 7


class LookedAt(Rule):
    """Keeps the latest :data:`WINDOW` tokens and those before them at which the window's queries look most."""

    chooses_by_head = True

    def __init__(self, share: float):
        super().__init__(share, interval=WINDOW, least=WINDOW)

    def observe(self, tokens: WholeTokens, query_HQD: Tensor, scaling: float) -> None:
        tokens.score_GN = tokens.score_GN + attention_sums(query_HQD[:, -WINDOW:], tokens, scaling)

    def kept(self, tokens: WholeTokens, count: int) -> Tensor:
        window = min(WINDOW, count)
        score_GN = tokens.score_GN.clone()
        # Without the window's own scores: being next to the window is no reason to keep a token.
        older_GN = score_GN[:, : tokens.num_held - window]
        score_GN[:, : tokens.num_held - window] = F.max_pool1d(older_GN, KERNEL, 1, KERNEL // 2)
        score_GN[:, tokens.num_held - window :] = torch.inf
        return top_scores(score_GN, count)


def attention_sums(query_HQD: Tensor, tokens: WholeTokens, scaling: float) -> Tensor:
    """Σ over queries, and over the heads that share a KV head, of the attention that each token gets, (G, N) fp32.

    Args:
        query_HQD: rotated queries of the latest Q places of the text.
        scaling: the model's score scale.
    """
    groups, queries = len(tokens.key_GND), query_HQD.shape[1]
    query_GJQD = query_HQD.float().unflatten(0, (groups, -1))
    place_Q = torch.arange(tokens.length - queries, tokens.length, device=query_HQD.device)
    sees_GQN = tokens.position_PN[:, None] <= place_Q[:, None]
    score_GJQN = torch.einsum("gjqd,gnd->gjqn", query_GJQD, tokens.key_GND.float()) * scaling
    weight_GJQN = score_GJQN.masked_fill(~sees_GQN[:, None], -torch.inf).softmax(dim=-1)
    return weight_GJQN.nan_to_num(0.0).sum(dim=(1, 2))


def snapkv_maker(
    model: PreTrainedModel, calibration: Calibration | None, share: float, text: TextLength | None = None
) -> MakeCache:
    """Caches that hold a share of the text so far, each KV head its own; the length of `text` does not matter."""
    return whole_tokens_maker(model, LookedAt(share))
