"""Expected Attention: each head keeps the tokens that queries to come will look at, as the mean and covariance of those so
far foretell (arXiv 2510.00636, section 3; kvpress's settings).

With un-rotated queries of a normal distribution (μ, Σ) and R the mean rotation of the next :data:`FUTURE` places, a key k
gets exp(k·Rμ / √d + kᵀRΣRᵀk / 2d) of the attention, over the sum of all. The score is that times the length of the value.

Shapes: H query heads, G KV heads, J query heads of one, Q queries of a call, N tokens held, F places to come, D head dim,
E rotary dims.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.rotary import Rotary

from .peer import MakeCache, TextLength
from .whole_tokens import LATEST, Rule, WholeTokens, latest_and_best, whole_tokens_maker

FUTURE = 512
SINK_TOKENS = 4  # always held; their queries are unlike others


class Queries(NamedTuple):
    """Un-rotated queries seen so far.

    Attributes:
        count: how many of each head.
        sum_HD, moment_HDD: Σ q and Σ qᵀq of each head, fp32.
    """

    count: int
    sum_HD: Tensor
    moment_HDD: Tensor

    @classmethod
    def of(cls, query_HQD: Tensor, before: "Queries | None") -> "Queries":
        """With those seen before."""
        query_HQD = query_HQD.float()
        found = cls(query_HQD.shape[1], query_HQD.sum(dim=1), query_HQD.mT @ query_HQD)
        return found if before is None else cls(*(new + old for new, old in zip(found, before, strict=True)))

    def mean_and_covariance(self) -> tuple[Tensor, Tensor]:
        """(H, D), (H, D, D)."""
        mean_HD = self.sum_HD / self.count
        return mean_HD, self.moment_HDD / self.count - mean_HD[:, :, None] * mean_HD[:, None, :]


class Expected(Rule):
    """Keeps the first :data:`SINK_TOKENS` tokens, the latest, and those between that are expected to matter.

    Args:
        rotary: the model's rotation; None for a model without one.
    """

    chooses_by_head = True

    def __init__(self, share: float, rotary: Rotary | None):
        super().__init__(share, most_latest=LATEST, least=SINK_TOKENS)
        self.rotary = rotary

    def watch(self, tokens: WholeTokens, query_HQD: Tensor, place_Q: Tensor, scaling: float) -> None:
        first = tokens.num_seen - query_HQD.shape[1]
        query_HQD = query_HQD[:, max(0, SINK_TOKENS - first) :]
        if query_HQD.shape[1]:
            # Rotations do not count padding.
            place_Q = torch.arange(tokens.num_seen - query_HQD.shape[1], tokens.num_seen, device=query_HQD.device)
            before = None if tokens.noted is None else tokens.noted[0]
            tokens.noted = Queries.of(unrotated(query_HQD.float(), place_Q, self.rotary), before), scaling

    def kept(self, tokens: WholeTokens, count: int) -> Tensor:
        queries, scaling = tokens.noted
        score_GN = self.scores(tokens, queries, scaling)
        score_GN[:, :SINK_TOKENS] = torch.inf
        return latest_and_best(score_GN, count, latest=self.latest_of(tokens))

    def scores(self, tokens: WholeTokens, queries: Queries, scaling: float) -> Tensor:
        """How much attention each token is expected to get, times the length of its value, (G, N) fp32."""
        mean_HD, covariance_HDD = queries.mean_and_covariance()
        if self.rotary is not None:
            mean_DD = mean_rotation(tokens.num_seen, mean_HD.shape[1], self.rotary, mean_HD.device)
            mean_HD, covariance_HDD = mean_HD @ mean_DD, mean_DD.mT @ covariance_HDD @ mean_DD
        key_G1ND = tokens.key_GND.float()[:, None]
        groups = len(tokens.key_GND)
        mean_GJD1 = mean_HD.unflatten(0, (groups, -1))[..., None]
        covariance_GJDD = covariance_HDD.unflatten(0, (groups, -1))
        score_GJN = scaling * (key_G1ND @ mean_GJD1)[..., 0]
        score_GJN = score_GJN + scaling**2 / 2 * ((key_G1ND @ covariance_GJDD) * key_G1ND).sum(dim=-1)
        score_GJN[..., :SINK_TOKENS] = -torch.inf  # first tokens take attention for being first
        weight_GJN = score_GJN.softmax(dim=-1)
        return weight_GJN.mean(dim=1) * tokens.value_GND.float().norm(dim=-1)


def unrotated(state_HQD: Tensor, place_Q: Tensor, rotary: Rotary | None) -> Tensor:
    """Rotated states as they were before, fp32."""
    if rotary is None:
        return state_HQD
    cos_1QE, sin_1QE = rotary.cos_sin(place_Q[None], torch.float32)
    turned_HQD = rotary.function(state_HQD[None], state_HQD[None], cos_1QE, -sin_1QE)[0][0]
    width = cos_1QE.shape[-1]  # some kinds scale cos and sin; other dims are not rotated
    scale_1Q1 = (cos_1QE[..., :1].square() + sin_1QE[..., :1].square()).expand(-1, -1, width)
    return turned_HQD / F.pad(scale_1Q1, (0, state_HQD.shape[-1] - width), value=1.0)


def mean_rotation(length: int, head_dim: int, rotary: Rotary, device: torch.device) -> Tensor:
    """The mean of the rotations of the next :data:`FUTURE` places behind `length` tokens, for rows x: x @ it, (D, D)."""
    place_1F = torch.arange(length, length + FUTURE, device=device)[None]
    cos_1FE, sin_1FE = rotary.cos_sin(place_1F, torch.float32)
    unit_1DFD = torch.eye(head_dim, device=device)[None, :, None].expand(1, head_dim, FUTURE, head_dim)
    return rotary.function(unit_1DFD, unit_1DFD, cos_1FE, sin_1FE)[0][0].mean(dim=1)


def expected_attention_maker(
    model: PreTrainedModel, calibration: Calibration | None, share: float, text: TextLength | None = None
) -> MakeCache:
    """Caches that hold a share of the text so far, each KV head its own, whatever the length of `text` is."""
    return whole_tokens_maker(model, Expected(share, Rotary.from_model(model)), text)
