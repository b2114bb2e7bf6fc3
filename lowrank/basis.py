"""PCA bases of keys and values, for both layouts.

Shapes: C = G·D joint width of a layer's KV heads, G KV heads, D head dim, R rank.
"""

import dataclasses

import torch
from torch import Tensor

from lowrank.errors import UserError

LAYOUTS = ("joint", "per_head")
ROPE_SIDES = ("pre", "post")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Basis:
    """An orthonormal basis of one layer's joint keys or values, columns in order of falling energy.

    Attributes:
        vectors_CC: orthonormal columns, fp32. In the ``per_head`` layout each column is zero outside one head.
        energy_C: the second moment along each column (its eigenvalue), fp32, falling within each head.
        layout: ``joint`` (one basis for all heads of the layer) or ``per_head``.
    """

    vectors_CC: Tensor
    energy_C: Tensor
    layout: str

    @property
    def width(self) -> int:
        return self.vectors_CC.shape[0]


def pca_basis(moment_CC: Tensor, *, layout: str, num_heads: int) -> Basis:
    """The eigenbasis of an uncentred second moment, eigenvalues descending.

    ``joint`` is DynaKV section 3.1. ``per_head`` diagonalises each head's own D×D block and orders the columns
    first-of-each-head, second-of-each-head, …, so that a prefix of R columns gives every head R/G of them.

    Args:
        moment_CC: second moment (see :class:`lowrank.moments.SecondMoment`), any floating dtype.
        layout: ``joint`` or ``per_head``.
        num_heads: G, must divide C.
    """
    if layout not in LAYOUTS:
        raise UserError(f"`layout` must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    width = moment_CC.shape[0]
    moment_CC = moment_CC.double()
    if layout == "joint":
        energy_C, vectors_CC = torch.linalg.eigh(moment_CC)
        energy_C, vectors_CC = energy_C.flip(0), vectors_CC.flip(1)
    else:
        head_dim = width // num_heads
        blocks_GDD = torch.stack(
            [moment_CC[g * head_dim : (g + 1) * head_dim, g * head_dim : (g + 1) * head_dim] for g in range(num_heads)]
        )
        energy_GD, vectors_GDD = torch.linalg.eigh(blocks_GDD)
        # (i-th direction, head) → column i·G + head
        energy_C = energy_GD.flip(1).T.reshape(-1)
        vectors_CC = moment_CC.new_zeros(width, width)
        for g in range(num_heads):
            vectors_CC[g * head_dim : (g + 1) * head_dim, g::num_heads] = vectors_GDD[g].flip(1)
    # Rounding can leave tiny negative eigenvalues on a rank-deficient moment.
    return Basis(vectors_CC=vectors_CC.float(), energy_C=energy_C.clamp(min=0).float(), layout=layout)
