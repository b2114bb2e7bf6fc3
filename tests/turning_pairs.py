"""Planned tokens of models whose pairs of dims turn at different rates, for tests of compiled attention in bf16."""

import torch
from planned_tokens import planned_tokens

from lowrank_kv.ops import native
from lowrank_kv.ops.lowrank_attention import LowRankTokens
from lowrank_kv.ops.rotation import RotaryTable

RANK = 51
# The last class has a few tokens of a chunk only, for which nodes do not pay.
CLASSES = (
    [(4,) * 3 + (1,) * 9, (5,) * 8 + (2,) * 20, (8,) * 4 + (3,) * 33, (16, 8) + (4,) * 49],
    [-0.3, 0.4, 1.6],
)
ONE_CLASS = [(6,) * 5 + (3,) * 40], []
# Head dim, KV heads, queries that share one, and base of the frequencies.
MODELS = {
    "demo": (64, 3, 3, 1e5),
    "no groups": (64, 4, 1, 1e6),
    "wide heads": (128, 2, 4, 1e6),
    "few pairs": (128, 4, 1, 1e4),
}


def frequencies(head_dim: int, base: float) -> torch.Tensor:
    return base ** (-torch.arange(0, head_dim, 2) / head_dim)


def table_of(model: str, positions: int, *, rounds: bool = False) -> RotaryTable:
    head_dim, _, _, base = MODELS[model]
    frequency_F = frequencies(head_dim, base)
    angle_TF = torch.arange(positions)[:, None] * frequency_F
    cos_TF, sin_TF = (table.bfloat16().float() if rounds else table for table in (angle_TF.cos(), angle_TF.sin()))
    return RotaryTable(cos_TF[None], sin_TF[None], native.slow_from(frequency_F))


def tokens_of(model: str, count: int, form, table: RotaryTable, *, start: int = 7, queries: int = 1) -> LowRankTokens:
    classes, bounds = form
    head_dim, groups, _, _ = MODELS[model]
    return planned_tokens(
        classes,
        torch.tensor(bounds),
        table,
        count,
        width=RANK,
        groups=groups,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        queries=queries,
        start=start,
    )


def query_of(model: str, queries: int) -> torch.Tensor:
    head_dim, groups, sharing, _ = MODELS[model]
    return torch.randn(groups * sharing, queries, head_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
