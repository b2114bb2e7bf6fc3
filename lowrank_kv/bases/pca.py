"""PCA bases of keys and values, for both layouts.

Shapes: C = G·D joint width of a layer's KV heads, G KV heads, D head dim, P parts (G heads of width D, or one of width C),
W width of a part.
"""

import dataclasses

import torch
from torch import Tensor

from lowrank_kv.utils.errors import UserError

LAYOUTS = ("joint", "per_head")
ROPE_SIDES = ("pre", "post")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Basis:
    """An orthonormal basis of each part of a layer's keys or values, columns in order of falling energy.

    Attributes:
        vectors_PWW: orthonormal columns, fp32.
        energy_PW: the second moment along each column (its eigenvalue), fp32, falling.
    """

    vectors_PWW: Tensor
    energy_PW: Tensor


def parts_of(moment_CC: Tensor, *, layout: str, num_heads: int) -> Tensor:
    """The moment of each part: the whole in the ``joint`` layout, every head's own block in ``per_head``; (P, W, W).

    Args:
        moment_CC: second moment of the joint states (see :class:`lowrank_kv.bases.moments.SecondMoment`).
        layout: ``joint`` (DynaKV, section 3.1) or ``per_head`` (OjaKV, appendix A.3).
        num_heads: G, must divide C.
    """
    if layout not in LAYOUTS:
        raise UserError(f"`layout` must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    if layout == "joint":
        return moment_CC[None]
    head_dim = moment_CC.shape[0] // num_heads
    blocks_GDGD = moment_CC.unflatten(0, (num_heads, head_dim)).unflatten(2, (num_heads, head_dim))
    return torch.stack([blocks_GDGD[g, :, g] for g in range(num_heads)])


def pca_basis(moment_PWW: Tensor) -> Basis:
    """The eigenbasis of uncentred second moments of any floating dtype, eigenvalues descending."""
    energy_PW, vectors_PWW = torch.linalg.eigh(moment_PWW.double())
    # Rounding can leave tiny negative eigenvalues on a rank-deficient moment.
    return Basis(vectors_PWW=vectors_PWW.flip(2).float(), energy_PW=energy_PW.flip(1).clamp(min=0).float())
