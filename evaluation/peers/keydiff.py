"""KeyDiff: each head keeps the tokens whose keys are least like its mean key (arXiv 2504.15364, section 3).

Shapes: G KV heads, N tokens held, D head dim.
"""

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.calibration.calibration import Calibration

from .peer import MakeCache, TextLength
from .whole_tokens import LATEST, Rule, WholeTokens, latest_and_best, whole_tokens_maker


class Distinct(Rule):
    """Keeps the latest tokens and those before them that are most unlike the others."""

    chooses_by_head = True

    def __init__(self, share: float):
        super().__init__(share, most_latest=LATEST, least=0)

    def kept(self, tokens: WholeTokens, count: int) -> Tensor:
        return latest_and_best(-likeness(tokens.key_GND), count, latest=self.latest_of(tokens))


def likeness(key_GND: Tensor) -> Tensor:
    """The cosine of each rotated key with the mean of its head's normalized keys, (G, N) fp32."""
    key_GND = key_GND.float()
    anchor_G1D = F.normalize(key_GND, dim=-1).mean(dim=1, keepdim=True)
    return F.cosine_similarity(key_GND, anchor_G1D, dim=-1)


def keydiff_maker(
    model: PreTrainedModel, calibration: Calibration | None, share: float, text: TextLength | None = None
) -> MakeCache:
    """Caches that hold a share of the text so far, each KV head its own, whatever the length of `text` is."""
    return whole_tokens_maker(model, Distinct(share), text)
