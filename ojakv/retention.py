"""Which of a prompt's tokens stay at full rank: those that compression would serve largest_residuals (OjaKV, section 5.1).

Shapes: H query heads, G KV heads, Q queries, N tokens, D head dim.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from ojakv.config import OjaKVConfig

# So many of a prompt's last queries weigh its residuals together.
QUERIES_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A run of tokens that is compressed as one, and the queries that weigh what compression costs them.

    Attributes:
        start, end: places of its first token and after its last; drafts may follow.
        query_HQD: of the last call that brought some of it; None where there are none, or nobody will ask.
        query_end: the place after the last of them.
    """

    start: int
    end: int
    query_HQD: Tensor | None
    query_end: int

    def held(self, earlier: "Prompt | None", *, with_queries: bool) -> "Prompt":
        """The same for a later call, with what of it was held before."""
        # A copy, since a call's queries of all sequences share one tensor.
        query_HQD = self.query_HQD.detach().clone() if with_queries else None
        start = self.start if earlier is None else earlier.start
        return dataclasses.replace(self, start=start, query_HQD=query_HQD)

    def cropped(self, length: int) -> "Prompt | None":
        """What is left of it when the sequence keeps its first `length` tokens."""
        if length <= self.start:
            return None
        query_HQD, query_end = self.query_HQD, min(self.query_end, length)
        if query_HQD is not None and query_end < self.query_end:
            left = query_HQD.shape[1] - (self.query_end - query_end)
            query_HQD = query_HQD[:, :left].clone() if left > 0 else None
        return Prompt(self.start, min(self.end, length), query_HQD, query_end)


def largest_residuals(
    residual_GND: Tensor, position_N: Tensor, prompt: Prompt, scaling: float, config: OjaKVConfig
) -> Tensor:
    """True for the share `full_rank_ratio` of tokens whose query-weighted residual is largest, (N,).

    e_t is the mean of |q · r_t| · scaling over the last w of the prompt's queries that may see token t and over all heads.

    Args:
        residual_GND: rotated keys less what their coefficients rebuild, fp32.
        position_N: places of their tokens.
        scaling: the model's score scale.
    """
    groups, tokens, head_dim = residual_GND.shape
    heads, queries = prompt.query_HQD.shape[:2]
    position_Q = torch.arange(prompt.query_end - queries, prompt.query_end, device=residual_GND.device)
    error_N = residual_GND.new_zeros(tokens)
    seen_N = residual_GND.new_zeros(tokens)
    # A few queries at a time: the products of all would be w times the size of a layer's keys.
    for start in range(max(0, queries - config.observation_window), queries, QUERIES_AT_ONCE):
        some = slice(start, start + QUERIES_AT_ONCE)
        query_GMD = prompt.query_HQD[:, some].float().reshape(groups, -1, head_dim)
        error_HQN = (query_GMD @ residual_GND.mT).abs_().view(heads, -1, tokens)
        may_see_QN = position_N <= position_Q[some, None]
        error_N += (error_HQN.sum(dim=0) * may_see_QN).sum(dim=0) * scaling
        seen_N += may_see_QN.sum(dim=0)
    score_N = error_N / (seen_N * heads).clamp(min=1)
    if config.score_pool > 1:
        pad = config.score_pool // 2
        score_N = F.avg_pool1d(score_N[None], config.score_pool, 1, pad, count_include_pad=False)[0]
    picked_N = torch.zeros(tokens, dtype=torch.bool, device=score_N.device)
    picked_N[score_N.topk(round(config.full_rank_ratio * tokens)).indices] = True
    return picked_N
