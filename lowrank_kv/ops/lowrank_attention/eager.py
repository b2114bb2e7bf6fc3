"""Decode attention over low-rank and full-rank tokens in plain torch.

Keys compressed after rotation are never rebuilt: q·(U c) = (Uᵀq)·c (OjaKV, section 3.2). Keys compressed before rotation
are rebuilt and rotated in tiles. Values are never rebuilt: out = U (softmax · c).

Shapes: H query heads, G KV heads, J = H/G query heads of a KV head, Q queries, D head dim, P parts (G of width D or one of
width C = G·D), W width of a part, N low-rank tokens, F full-rank tokens, R rank.
"""

import dataclasses

import torch
from torch import Tensor

from lowrank_kv.ops.lowrank_attention.tokens import LowRankTokens, Operands
from lowrank_kv.ops.rebuild_scores import at_least_fp32, rebuild_scores
from lowrank_kv.ops.rotation import Positions, Rotation, positions_of_part
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.softmax import softmax_weights
from lowrank_kv.stores.coefficients import Coefficients


def lowrank_attention(query_HQD: Tensor, tokens: LowRankTokens, scoring: Scoring) -> Tensor:
    """See :func:`lowrank_kv.ops.lowrank_attention.lowrank_attention`."""
    keys, values, rotation, positions, mask_QT = tokens
    heads, queries, head_dim = query_HQD.shape
    groups, low = keys.full_GFD.shape[0], keys.coef.length
    query_GMD = query_HQD.reshape(groups, -1, head_dim)  # M = J·Q rows share a KV head
    exact_GMD = at_least_fp32(query_GMD)
    score_GMT = torch.cat(
        [_scores(query_GMD, keys, rotation, positions), exact_GMD @ keys.full_GFD.mT.to(exact_GMD.dtype)], dim=2
    )
    score_HQT = score_GMT.view(heads, queries, -1)
    weight_HQT = softmax_weights(score_HQT, scoring, mask_QT)
    weight_GMT = weight_HQT.to(query_HQD.dtype).view(score_GMT.shape)
    parts, _, rank = values.basis_PWR.shape
    weight_PMN = weight_GMT[:, :, :low].reshape(parts, heads * queries // parts, low)
    latent_PMR = values.coef.weighted_sum(weight_PMN)
    output_GMD = weight_GMT[:, :, low:] @ values.full_GFD
    output_GMD += latent_PMR.view(groups, -1, rank) @ values.head_basis().mT
    return output_GMD.view(heads, queries, head_dim)


def _scores(query_GMD: Tensor, keys: Operands, rotation: Rotation | None, positions: Positions | None) -> Tensor:
    """Scores of the low-rank tokens, (G, M, N), in fp32 at least."""
    groups, rows, _ = query_GMD.shape
    parts, _, rank = keys.basis_PWR.shape
    if rotation is None:
        exact_GMD = at_least_fp32(query_GMD)
        latent_GMR = exact_GMD @ keys.head_basis().to(exact_GMD.dtype)
        return keys.coef.dot(latent_GMR.view(parts, -1, rank)).view(groups, rows, -1)
    scores = [
        rebuild_scores(part_GMD, [_Part(keys.coef, part)], basis_WR.T, rotation, positions_of_part(positions, part))
        for part, (part_GMD, basis_WR) in enumerate(zip(query_GMD.chunk(parts), keys.basis_PWR, strict=True))
    ]
    return torch.cat(scores) if parts > 1 else scores[0]


@dataclasses.dataclass(frozen=True)
class _Part:
    """The rows of one part of coefficients."""

    coef: Coefficients
    part: int

    @property
    def length(self) -> int:
        return self.coef.length

    def rows(self, start: int, end: int) -> Tensor:
        return self.coef.rows(start, end)[self.part]
