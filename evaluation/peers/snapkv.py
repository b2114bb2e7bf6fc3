"""SnapKV: each head keeps the tokens that the latest queries look at (arXiv 2404.14469, section 4).

The paper thins a prompt once and keeps all that is generated, which in the end takes any number of bytes. Here the choice is
made again after every 32 decoded tokens, or a quarter of those held where that is less, by their queries, so that what is
held is its share of the text on average.

Shapes: G KV heads, N tokens held.
"""

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.calibration.calibration import Calibration

from .peer import MakeCache, TextLength
from .whole_tokens import LATEST, Rule, WholeTokens, latest_and_best, whole_tokens_maker

KERNEL = 7


class LookedAt(Rule):
    """Keeps the latest tokens and those before them at which their queries look most."""

    chooses_by_head = sums_attention = True

    def __init__(self, share: float):
        super().__init__(share, most_latest=LATEST, least=0)

    def kept(self, tokens: WholeTokens, count: int) -> Tensor:
        latest = self.latest_of(tokens)
        older = tokens.num_held - latest
        # Without the window's own scores: being next to the window is no reason to keep a token.
        pooled_GN = F.max_pool1d(tokens.score_GN[:, :older], KERNEL, 1, KERNEL // 2)
        return latest_and_best(F.pad(pooled_GN, (0, latest)), count, latest=latest)


def snapkv_maker(
    model: PreTrainedModel, calibration: Calibration | None, share: float, text: TextLength | None = None
) -> MakeCache:
    """Caches that hold a share of the text so far, each KV head its own, whatever the length of `text` is."""
    return whole_tokens_maker(model, LookedAt(share), text)
