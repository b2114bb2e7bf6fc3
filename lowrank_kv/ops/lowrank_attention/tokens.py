"""One sequence's tokens, as low-rank attention takes them.

Shapes: H query heads, G KV heads, D head dim, C = G·D, P parts (G of width D, or one of width C), W width of a part, Q new
queries, N low-rank tokens, F full-rank tokens, T = N + F, R rank.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from torch import Tensor

from lowrank_kv.ops.native.reading import rows_of
from lowrank_kv.ops.rotation import Positions, Rotation
from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.growable_tensor import GrowingTensor


@dataclasses.dataclass(frozen=True)
class Operands:
    """One sequence's keys, or values, of one layer.

    Attributes:
        coef: of the low-rank tokens, (P, N, R).
        basis_PWR: token n of part p is ``basis[p] @ coef[p, n]``.
        full: tokens at full rank, (G, F, D); keys are rotated.
        prepared: what operations have made of the basis, by what it is for; all operands of one basis may share it.
    """

    coef: Coefficients
    basis_PWR: Tensor
    full: GrowingTensor
    prepared: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def full_GFD(self) -> Tensor:  # noqa: N802 (a tensor's dims are part of its name)
        return self.full.rows

    @functools.cached_property
    def decoder_PRW(self) -> Tensor:  # noqa: N802
        """The map from coefficients to rows; a view."""
        return self.basis_PWR.mT

    def head_basis(self) -> Tensor:
        """The basis as one block of rows for each KV head, (G, D, R)."""
        groups, _, head_dim = self.full.buffer.shape
        return self.basis_PWR.reshape(groups, head_dim, -1)

    def rebuild(self) -> Tensor:
        """Low-rank tokens at full width, (G, N, D)."""
        return self.rebuilt(rows_of(self.coef))

    def rebuilt(self, coef_PNR: Tensor) -> Tensor:
        """Tokens at full width, (G, N, D), from coefficients, in whose dtype they are rebuilt."""
        groups, _, head_dim = self.full.buffer.shape
        rows_PNW = coef_PNR @ self.decoder_PRW.to(coef_PNR.dtype)
        if rows_PNW.shape[0] == groups:
            return rows_PNW
        return rows_PNW[0].unflatten(1, (groups, head_dim)).transpose(0, 1)


class LowRankTokens(NamedTuple):
    """The tokens of one sequence in one layer.

    Attributes:
        keys, values: of the same tokens.
        rotation: of keys that were compressed before it; None when they were compressed after it.
        positions: of the low-rank tokens, (N,), or (P, N) where each part holds tokens of its own; needed with `rotation`.
        mask_QT: True where a query may see a token, low-rank tokens first, then full-rank ones; None when it may see all.
            (H, Q, T) where each part holds tokens of its own.
    """

    keys: Operands
    values: Operands
    rotation: Rotation | None = None
    positions: Positions | None = None
    mask_QT: Tensor | None = None

    @property
    def parts_differ(self) -> bool:
        """Whether each part holds tokens of its own."""
        positions, mask_QT = self.positions, self.mask_QT
        has_own_positions = not (positions is None or isinstance(positions, slice)) and positions.dim() == 2
        return has_own_positions or (mask_QT is not None and mask_QT.dim() == 3)
