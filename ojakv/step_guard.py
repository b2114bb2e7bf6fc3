"""How far a step may move a basis without spoiling the rows that are stored in it.

Shapes: P parts, W width of a part, R rank.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ojakv.change_of_basis import energy_of

# A step that costs too much is halved at most this often, then left out.
MAX_HALVINGS = 6


class Move(NamedTuple):
    """A basis to move to, and what the move costs the stored rows.

    Attributes:
        basis_PWR: the new basis.
        change_PRR: takes coefficients in the old basis to coefficients in the new one.
        lost: share of the stored rows' energy that is lost.
        distance: how far the stored rows move, ‖·‖ over all of them.
    """

    basis_PWR: Tensor
    change_PRR: Tensor
    lost: float
    distance: float


class StepGuard:
    """Halves steps until they keep within two bounds, or refuses them.

    A move takes the stored rows to their projection on the new basis, at right angles to the energy it drops: they move by
    the root of the energy they lose. Moves in different directions may add up to more than what is lost of the energy in
    the end, so their lengths are added.

    Args:
        max_loss: most energy of the stored rows that one move may lose, as a share.
        max_drift: most that all moves together may move the stored rows, as a share of their norm; None has no bound.

    Attributes:
        kept_energy: product over moves of the share of stored energy that survived.
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
            stored_PRR: Σ cᵀc of the stored rows; None where nothing is stored, and nothing can be lost.
            rounding: share of their energy that the stored rows lose by being rounded again.
        """
        energy = 0.0 if stored_PRR is None else energy_of(stored_PRR)
        for halving in range(MAX_HALVINGS + 1):
            new_PWR = propose(0.5**halving)
            if new_PWR is None:
                return None
            change_PRR = old_PWR.mT @ new_PWR
            lost = lost_energy(stored_PRR, old_PWR, new_PWR, change_PRR) / energy + rounding if energy else 0.0
            move = Move(new_PWR, change_PRR, lost, math.sqrt(lost * energy))
            if lost <= self.max_loss and self._is_within_drift(move.distance, (1 - lost) * energy):
                return move
        self.num_refused += 1
        return None

    def _is_within_drift(self, distance: float, energy: float) -> bool:
        limit = self.max_drift
        return limit is None or self.distance + distance <= limit * math.sqrt(max(0.0, energy))

    def accept(self, move: Move) -> None:
        """Count a move that is made."""
        self.kept_energy *= 1 - move.lost
        self.distance += move.distance

    def forget_rows(self) -> None:
        """All stored rows are gone, so none has moved."""
        self.distance = 0.0


def lost_energy(stored_PRR: Tensor, old_PWR: Tensor, new_PWR: Tensor, change_PRR: Tensor) -> float:
    """The energy that rows C·Uᵀ lose when they are projected on a new basis V: tr(D S Dᵀ) with S = CᵀC and D the part of U
    outside of V. The difference tr(S) − tr(Mᵀ S M) with M = UᵀV is the same, but vanishes in fp32 for a small move."""
    outside_PWR = old_PWR - new_PWR @ change_PRR.mT
    return max(0.0, float((outside_PWR @ stored_PRR * outside_PWR).sum()))
