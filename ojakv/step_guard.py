"""How far a step may move a basis without spoiling the rows that are stored in it.

Shapes: P parts, W width of a part, R rank, X any.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ojakv.change_of_basis import energy_of

# A step that costs too much is halved at most this often, then left out.
MAX_HALVINGS = 6
# Stored coefficients stay as they are where that moves rows by so little more, as a share of what projecting them loses.
HARDLY_MORE = 0.01
# A coefficient counts in the price of a step for at most so many times the energy of the median one.
OUTLIER = 100.0


class Move(NamedTuple):
    """A basis to move to, and what the move does to the stored rows. Energies are Σ ‖·‖² over all of them.

    Attributes:
        basis_PWR: the new basis.
        step_PRR: coefficients c in the old basis are c − c · step in the new one; None where they stay as they are.
        energy: of the rows.
        moved: by how much the rows move.
        rounded: by how much they move beside that because changed coefficients are rounded; estimated, or measured once the
            move is made.
        price: the largest share of a part's energy that moves, or of what that is with outliers held down: one direction, or
            one head, with all of the energy would hide what the others lose.
    """

    basis_PWR: Tensor
    step_PRR: Tensor | None
    energy: float = 0.0
    moved: float = 0.0
    rounded: float = 0.0
    price: float = 0.0

    @property
    def lost(self) -> float:
        """The share of the rows' energy that no longer points where it did; 1 where all moves and is rounded, too."""
        return min(1.0, (self.moved + self.rounded) / self.energy) if self.energy else 0.0

    @property
    def distance(self) -> float:
        """How far the stored rows move, ‖·‖ over all of them."""
        return math.sqrt(self.moved + self.rounded)


def move_between(old_PWR: Tensor, new_PWR: Tensor, stored_PRR: Tensor | None, rounding: float) -> Move:
    """The way from one basis to another that costs the stored rows less.

    Rows C Uᵀ are projected on the new basis V, which loses the part of U outside of V, and their coefficients rounded anew.
    Or C stays, and rows turn with the basis to C Vᵀ. To first order in the angle they are the same rows, and nothing is
    read, written or rounded.

    With Δ = V − U, the projection's coefficients are C UᵀV (VᵀV)⁻¹ = C − C ΔᵀV (VᵀV)⁻¹, whatever VᵀV is. That of a basis in
    fp32 is the identity to rounding, which is left out where it multiplies Δ. In C UᵀV it would multiply C, at every update,
    and of an orthonormalized basis it is on the same side of 1 more often than not: rows would grow.

    Args:
        stored_PRR: Σ cᵀc of the stored rows; None where nothing is stored.
        rounding: share of their energy that the stored rows lose by being rounded again.
    """
    if stored_PRR is None or not energy_of(stored_PRR):
        return Move(new_PWR, None)
    difference_PWR = new_PWR - old_PWR
    step_PRR = difference_PWR.mT @ new_PWR
    outside_PWR = difference_PWR - new_PWR @ step_PRR.mT
    costs = [
        # Rows that turn move by C · step beside what projecting loses, and at right angles to it.
        _Costs.of(moment_PRR, outside_PWR, step_PRR.mT, rounding)
        for moment_PRR in (stored_PRR, without_outliers(stored_PRR))
        if moment_PRR is not None
    ]
    stays = all(bool(each.turned_P.sum() <= (HARDLY_MORE * each.lost_P + each.rounded_P).sum()) for each in costs)
    [true, *_] = costs
    return Move(
        new_PWR,
        None if stays else step_PRR,
        energy=float(true.energy_P.sum()),
        moved=float((true.lost_P + true.turned_P).sum() if stays else true.lost_P.sum()),
        rounded=0.0 if stays else float(true.rounded_P.sum()),
        price=max(each.price(stays=stays) for each in costs),
    )


class _Costs(NamedTuple):
    """What a move does to the rows of each part, (P,) energies each: theirs, what projecting loses, how much farther they
    turn where their coefficients stay, and what rounding changed ones is expected to take."""

    energy_P: Tensor
    lost_P: Tensor
    turned_P: Tensor
    rounded_P: Tensor

    @classmethod
    def of(cls, moment_PRR: Tensor, outside_PWR: Tensor, turned_PRR: Tensor, rounding: float) -> "_Costs":
        energy_P = moment_PRR.diagonal(dim1=1, dim2=2).sum(dim=1)
        lost_P, turned_P = (mapped_energy(each, moment_PRR) for each in (outside_PWR, turned_PRR))
        return cls(energy_P, lost_P, turned_P, rounding * energy_P)

    def price(self, *, stays: bool) -> float:
        """The largest share of a part's energy that moves."""
        moved_P = self.lost_P + (self.turned_P if stays else self.rounded_P)
        return float((moved_P / self.energy_P.clamp(min=torch.finfo(moved_P.dtype).tiny)).amax())


class StepGuard:
    """Halves steps until they keep within two bounds, or refuses them.

    A move takes the stored rows to their projection on the new basis, or next to it. Moves in different directions may add
    up to more than what is lost of the energy in the end, so their lengths are added.

    Args:
        max_loss: highest price of a move (:class:`Move`), a share of the stored rows' energy.
        max_drift: most that all moves together may move the stored rows, as a share of their norm; None has no bound.

    Attributes:
        kept_energy: product over moves of the share of stored energy that still points where it did.
        distance: sum over moves of how far they moved the stored rows, ‖·‖.
        num_refused: steps left out because even a small share of them would have cost too much.
    """

    def __init__(self, max_loss: float, max_drift: float | None):
        self.max_loss, self.max_drift = max_loss, max_drift
        self.kept_energy = 1.0
        self.distance = 0.0
        self.num_refused = 0

    def largest_move(
        self, old_PWR: Tensor, propose: Callable[[float], Tensor | None], stored_PRR: Tensor | None, rounding: float
    ) -> Move | None:
        """The largest of the halved steps that keeps within the bounds; None where there is none.

        Args:
            old_PWR: the present basis.
            propose: share of a step → the basis it leads to, or None where the present one is to stay.
            stored_PRR, rounding: as for :func:`move_between`.
        """
        for halving in range(MAX_HALVINGS + 1):
            new_PWR = propose(0.5**halving)
            if new_PWR is None:
                return None
            move = move_between(old_PWR, new_PWR, stored_PRR, rounding)
            if move.price <= self.max_loss and self._is_within_drift(move):
                return move
        self.num_refused += 1
        return None

    def _is_within_drift(self, move: Move) -> bool:
        limit, left = self.max_drift, max(0.0, 1 - move.lost) * move.energy
        return limit is None or self.distance + move.distance <= limit * math.sqrt(left)

    def accept(self, move: Move) -> None:
        """Count a move that is made."""
        self.kept_energy *= 1 - move.lost
        self.distance += move.distance

    def forget_rows(self) -> None:
        """All stored rows are gone, so none has moved."""
        self.distance = 0.0


def mapped_energy(map_PXR: Tensor, stored_PRR: Tensor) -> Tensor:
    """Σ ‖M c‖² over rows c of each part with Σ cᵀc = S: tr(M S Mᵀ), (P,)."""
    return (map_PXR @ stored_PRR * map_PXR).sum(dim=(1, 2)).clamp(min=0)


def without_outliers(stored_PRR: Tensor) -> Tensor | None:
    """The moment of rows whose outlier coefficients are scaled down to :data:`OUTLIER` times the energy of the median one;
    None where there are none."""
    energy_PR = stored_PRR.diagonal(dim1=1, dim2=2)
    most_P1 = OUTLIER * energy_PR.median(dim=1, keepdim=True).values
    is_outlier_PR = (energy_PR > most_P1) & (most_P1 > 0)
    if not is_outlier_PR.any():
        return None
    scale_PR = torch.where(is_outlier_PR, (most_P1 / energy_PR).sqrt(), 1.0)
    return scale_PR[:, :, None] * stored_PRR * scale_PR[:, None, :]
