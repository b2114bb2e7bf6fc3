"""Decode attention over low-rank and full-rank tokens in plain torch.

Keys compressed after rotation are never rebuilt: q·(U c) = (Uᵀq)·c (OjaKV, section 3.2). Keys compressed before rotation
are rebuilt and rotated in tiles. Values are never rebuilt: out = U (softmax · c).

Shapes: H query heads, G KV heads, J = H/G query heads of a KV head, Q queries, D head dim, P parts (G of width D or one of
width C = G·D), W width of a part, N low-rank tokens, F full-rank tokens, R rank.
"""

import dataclasses

import torch
from torch import Tensor

from lowrank.ops.capped import capped
from lowrank.ops.rebuilt import rebuilt_scores
from lowrank.ops.rotation import Places, Rotation


@dataclasses.dataclass(frozen=True)
class Operands:
    """One sequence's keys, or values, of one layer.

    Attributes:
        coef_PNR: of the low-rank tokens.
        basis_PWR: orthonormal; token n of part p is ``basis[p] @ coef[p, n]``.
        full_GFD: tokens at full rank; keys are rotated.
    """

    coef_PNR: Tensor
    basis_PWR: Tensor
    full_GFD: Tensor

    def head_basis(self) -> Tensor:
        """The basis as one block of rows for each KV head, (G, D, R)."""
        groups, _, head_dim = self.full_GFD.shape
        return self.basis_PWR.reshape(groups, head_dim, -1)

    def rebuilt(self) -> Tensor:
        """Low-rank tokens at full width, (G, N, D)."""
        groups, _, head_dim = self.full_GFD.shape
        rows_PNW = self.coef_PNR @ self.basis_PWR.mT
        if rows_PNW.shape[0] == groups:
            return rows_PNW
        return rows_PNW[0].unflatten(1, (groups, head_dim)).transpose(0, 1)


def lowrank_attention(
    query_HQD: Tensor,
    keys: Operands,
    values: Operands,
    *,
    scaling: float,
    rotation: Rotation | None = None,
    places: Places | None = None,
    softcap: float | None = None,
    mask_QT: Tensor | None = None,
) -> Tensor:
    """Attention of Q queries of one sequence over its N low-rank and F full-rank tokens.

    Args:
        query_HQD: rotated queries.
        keys, values: of the same tokens.
        scaling: the model's own score scale, usually 1/√D (not 1/√R).
        rotation: of keys compressed before it; None when they were compressed after it.
        places: of the low-rank tokens; needed with `rotation`.
        softcap: scores s become softcap · tanh(s / softcap) before the mask (Gemma 2, section 2); None leaves them.
        mask_QT: True where a query may see a token, low-rank tokens first, then full-rank ones; None when it may see all.

    Returns:
        (H, Q, D) in the dtype of `query_HQD`; scores and softmax are in fp32.
    """
    heads, queries, head_dim = query_HQD.shape
    groups, low = keys.full_GFD.shape[0], keys.coef_PNR.shape[1]
    query_GMD = query_HQD.reshape(groups, -1, head_dim)  # M = J·Q rows share a KV head
    score_GMT = torch.cat(
        [_scores(query_GMD, keys, rotation, places), query_GMD @ keys.full_GFD.mT],
        dim=2,
    )
    score_HQT = capped(score_GMT.view(heads, queries, -1).float() * scaling, softcap)
    if mask_QT is not None:
        score_HQT = score_HQT.masked_fill(~mask_QT, torch.finfo(torch.float32).min)
    weight_GMT = score_HQT.softmax(dim=-1).to(query_HQD.dtype).view(score_GMT.shape)
    parts, _, rank = values.coef_PNR.shape
    weight_PMN = weight_GMT[:, :, :low].reshape(parts, heads * queries // parts, low)
    latent_PMR = weight_PMN @ values.coef_PNR
    output_GMD = weight_GMT[:, :, low:] @ values.full_GFD
    output_GMD += latent_PMR.view(groups, -1, rank) @ values.head_basis().mT
    return output_GMD.view(heads, queries, head_dim)


def _scores(query_GMD: Tensor, keys: Operands, rotation: Rotation | None, places: Places | None) -> Tensor:
    """Scores of the low-rank tokens, (G, M, N)."""
    groups, rows, _ = query_GMD.shape
    parts, low, rank = keys.coef_PNR.shape
    if rotation is None:
        latent_GMR = query_GMD @ keys.head_basis()
        return (latent_GMR.view(parts, -1, rank) @ keys.coef_PNR.mT).view(groups, rows, low)
    scores = [
        rebuilt_scores(part_GMD, [coef_NR], basis_WR.T, rotation, places)
        for part_GMD, coef_NR, basis_WR in zip(query_GMD.chunk(parts), keys.coef_PNR, keys.basis_PWR, strict=True)
    ]
    return torch.cat(scores) if parts > 1 else scores[0]
