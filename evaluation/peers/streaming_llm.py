"""StreamingLLM: the first tokens and the latest ones (arXiv 2309.17453, section 3).

Keys keep the rotations of their places in the text, where the paper numbers the tokens held anew; within the length that the
model was trained for this changes nothing that it has not seen.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.calibration.calibration import Calibration

from .peer import MakeCache, TextLength
from .whole_tokens import Rule, WholeTokens, whole_tokens_maker

SINK_TOKENS = 4
_LEAST = 16  # latest tokens held whatever their share is


class SinksAndLatest(Rule):
    """Keeps the first :data:`SINK_TOKENS` and the latest tokens."""

    def __init__(self, share: float):
        super().__init__(share, most_latest=0, least=SINK_TOKENS + _LEAST)

    def kept(self, tokens: WholeTokens, count: int) -> Tensor:
        row_N = torch.arange(tokens.num_held, device=tokens.key_GND.device)
        return torch.cat([row_N[:SINK_TOKENS], row_N[tokens.num_held - (count - SINK_TOKENS) :]])[None]


def streaming_maker(
    model: PreTrainedModel, calibration: Calibration | None, share: float, text: TextLength | None = None
) -> MakeCache:
    """Caches of a window as long as the share of the text so far, whatever the length of `text` is."""
    return whole_tokens_maker(model, SinksAndLatest(share), text)
