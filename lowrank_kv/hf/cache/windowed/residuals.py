"""Which of a prompt's tokens lose most when they are compressed (OjaKV, section 5.1).

Shapes: H query heads, G KV heads, Q queries, N tokens, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lowrank_kv.hf.cache.prompt_tracker import Prompt
from lowrank_kv.hf.cache.windowed.config import WindowedConfig

# This many of a prompt's last queries weigh its residuals together.
QUERIES_AT_ONCE = 8


def largest_residuals(
    residual_GND: Tensor, position_N: Tensor, prompt: Prompt, count: int, scaling: float, config: WindowedConfig
) -> Tensor:
    """True for the `count` tokens whose query-weighted residual is largest, (N,).

    e_t is the mean of |q · r_t| · scaling over the last w of the prompt's queries that may see token t and over all heads.

    Args:
        residual_GND: rotated keys less the keys rebuilt from their coefficients, fp32.
        position_N: positions of their tokens.
        prompt: of this one sequence.
        scaling: the model's score scale.
    """
    groups, tokens, head_dim = residual_GND.shape
    query_HQD = prompt.query_BHQD[0]
    heads, queries = query_HQD.shape[:2]
    position_Q = torch.arange(prompt.query_end - queries, prompt.query_end, device=residual_GND.device)
    error_N = residual_GND.new_zeros(tokens)
    seen_N = residual_GND.new_zeros(tokens)
    # A few queries at a time: the products of all would be w times the size of a layer's keys.
    for start in range(max(0, queries - config.observation_window), queries, QUERIES_AT_ONCE):
        some = slice(start, start + QUERIES_AT_ONCE)
        query_GMD = query_HQD[:, some].float().reshape(groups, -1, head_dim)
        error_HQN = (query_GMD @ residual_GND.mT).abs_().view(heads, -1, tokens)
        may_see_QN = position_N <= position_Q[some, None]
        error_N += (error_HQN.sum(dim=0) * may_see_QN).sum(dim=0) * scaling
        seen_N += may_see_QN.sum(dim=0)
    score_N = error_N / (seen_N * heads).clamp(min=1)
    if config.score_pool > 1:
        pad = config.score_pool // 2
        score_N = F.avg_pool1d(score_N[None], config.score_pool, 1, pad, count_include_pad=False)[0]
    is_largest_N = torch.zeros(tokens, dtype=torch.bool, device=score_N.device)
    is_largest_N[score_N.topk(count).indices] = True
    return is_largest_N
