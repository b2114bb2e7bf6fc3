"""Low-rank bases that follow the rows they see.

A tracker holds one orthonormal fp32 basis for each part of a state: each KV head in the ``per_head`` layout, all of them
together in the ``joint`` one.

Shapes: P parts, N rows, M rows of a sketch, W width of a part (D or C), R rank.
"""

import abc
import copy
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor

from lowrank_kv.hf.cache.windowed.plan import by_columns
from lowrank_kv.stores.growable_tensor import writable
from lowrank_kv.utils.errors import UserError
from ojakv.change_of_basis import identity_like

# Energies below this share of the largest count as this much. Directions that were hardly seen would turn by the rounding of
# fp32 divided by next to nothing: the bases of a short text would depend on the padding and the batch beside it.
ENERGY_FLOOR = 1e-4
# A basis whose columns would move by less is there already.
SMALLEST_MOVE = 1e-5


class NewRows:
    """Rows that a basis follows. Their second moment is formed once where that is less work.

    Args:
        rows_PNW: fp32.
        steps: how many steps of the basis they take part in.
    """

    def __init__(self, rows_PNW: Tensor, steps: int = 1):
        self.rows_PNW, self._steps = rows_PNW, steps
        self._moment_PWW: Tensor | None = None

    def times(self, vectors_PWR: Tensor) -> Tensor:
        """XᵀX U, (P, W, R)."""
        _, width, rank = vectors_PWR.shape
        count, steps = self.rows_PNW.shape[1], self._steps
        if width * (count + steps * rank) >= 2 * steps * count * rank:
            return self.rows_PNW.mT @ (self.rows_PNW @ vectors_PWR)
        if self._moment_PWW is None:
            self._moment_PWW = self.rows_PNW.mT @ self.rows_PNW
        return self._moment_PWW @ vectors_PWR


class Tracker(abc.ABC):
    """A basis and the rule by which it moves."""

    def __init__(self, vectors_PWR: Tensor, name: str):
        """
        Args:
            vectors_PWR: orthonormal columns to start from; shared, never written to.
            name: the states it represents, such as ``layer 3 keys``, for errors.
        """
        self.vectors_PWR, self.name = by_columns(vectors_PWR.float()), name
        self._has_moved = False  # until then the basis is the calibration's, which all sequences share

    @abc.abstractmethod
    def observe(self, rows_PNW: Tensor) -> None:
        """See rows (fp32), each exactly once, before :meth:`propose` is called with them."""

    @abc.abstractmethod
    def propose(self, new: NewRows, stored_PRR: Tensor, learning_rate: float, share: float = 1.0) -> Tensor | None:
        """An orthonormal basis that represents the rows better, (P, W, R); None where the present one is to stay.

        Args:
            new: the newest rows.
            stored_PRR: Σ cᵀc of the coefficients stored so far in the present basis.
            learning_rate: η, where the rule has one.
            share: how much of the full step to take, in (0, 1].
        """

    @abc.abstractmethod
    def defer(self, new: NewRows) -> None:
        """Remember rows for the next :meth:`propose`, because no step follows them now."""

    def move_to(self, vectors_PWR: Tensor) -> None:
        """Make a proposed basis the present one."""
        self.vectors_PWR, self._has_moved = by_columns(vectors_PWR), True

    def tensors(self) -> Iterator[Tensor]:
        """Tensors that this tracker holds for its own sequence."""
        if self._has_moved:
            yield self.vectors_PWR

    def clone(self) -> Self:
        """An independent copy."""
        twin = copy.copy(self)
        if self._has_moved:
            twin.vectors_PWR = self.vectors_PWR.clone()
        return twin


class OjaTracker(Tracker):
    """Oja's rule on batches, made orthonormal (OjaKV, section 5.2): U ← orth(U + η (I − U Uᵀ) XᵀX U / N). The paper's
    Algorithm 1 has no 1/N, so that its η would mean N times as much.

    Preconditioned (beyond the paper), each direction's step is divided by the energy known of it: with S the second
    moment of what is stored, U ← orth(U + η (I − U Uᵀ) XᵀX U · (S + UᵀXᵀX U)⁻¹). At η = 1 this spans what one orthogonal
    iteration on the moment of stored and new rows together spans, whatever the scale of the states; the more is
    stored, the less new rows move the basis.
    """

    def __init__(self, vectors_PWR: Tensor, name: str, *, preconditioned: bool):
        super().__init__(vectors_PWR, name)
        self.preconditioned = preconditioned
        self._deferred_PWR: Tensor | None = None  # sum of the steps for rows whose steps were put off

    def observe(self, rows_PNW: Tensor) -> None:
        pass

    def propose(self, new: NewRows, stored_PRR: Tensor, learning_rate: float, share: float = 1.0) -> Tensor | None:
        learning_rate *= share
        step_PWR, seen_PRR = self._outside(new)
        if self.preconditioned:
            step_PWR = torch.linalg.solve(_lifted(stored_PRR + seen_PRR), step_PWR, left=False)
        what = f"{self.name}: an Oja step of rate {learning_rate:g}"
        return orthonormal(self.vectors_PWR + learning_rate * step_PWR, what, "use a smaller learning rate")

    def defer(self, new: NewRows) -> None:
        # The basis does not move until the next step, so the sum is exact.
        self._deferred_PWR, _ = self._outside(new)

    def _outside(self, new: NewRows) -> tuple[Tensor, Tensor]:
        """(I − U Uᵀ) XᵀX U of the newest rows, over N unless preconditioned, and the like of the deferred ones, (P, W, R);
        UᵀXᵀX U of the newest alone, (P, R, R)."""
        moment_PWR = new.times(self.vectors_PWR)
        seen_PRR = self.vectors_PWR.mT @ moment_PWR
        outside_PWR = moment_PWR - self.vectors_PWR @ seen_PRR
        if not self.preconditioned:
            outside_PWR /= new.rows_PNW.shape[1]
        return outside_PWR if self._deferred_PWR is None else outside_PWR + self._deferred_PWR, seen_PRR

    def move_to(self, vectors_PWR: Tensor) -> None:
        super().move_to(vectors_PWR)
        self._deferred_PWR = None

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        if self._deferred_PWR is not None:
            yield self._deferred_PWR

    def clone(self) -> Self:
        twin = super().clone()
        if self._deferred_PWR is not None:
            twin._deferred_PWR = self._deferred_PWR.clone()
        return twin


class FrequentDirections(Tracker):
    """The leading directions of a Frequent Directions sketch of 2R rows (SubSpace-A).

    A full sketch B is rotated to its singular directions and every squared singular value lowered by the (R+1)-th, which
    frees at least R rows. With A all rows seen and k ≤ R, ‖A − π_k(A)‖²_F ≤ (1 + k / (R + 1 − k)) ‖A − A_k‖²_F, where
    π_k projects on the k leading directions of the sketch.

    Args:
        energy_PR: energies of the starting directions.
        prior_rows: how many rows the starting basis counts for.
    """

    def __init__(self, vectors_PWR: Tensor, name: str, *, energy_PR: Tensor, prior_rows: float):
        super().__init__(vectors_PWR, name)
        parts, width, rank = vectors_PWR.shape
        self.sketch_PMW = torch.zeros(parts, 2 * rank, width, dtype=torch.float32, device=vectors_PWR.device)
        self.used = 0
        if prior_rows:
            start_PRW = (energy_PR * prior_rows).sqrt()[:, :, None] * self.vectors_PWR.mT
            self.sketch_PMW[:, :rank] = start_PRW
            self.used = rank

    def observe(self, rows_PNW: Tensor) -> None:
        self.sketch_PMW = writable(self.sketch_PMW)
        while rows_PNW.shape[1]:
            if self.used == self.sketch_PMW.shape[1]:
                self._shrink()
            taken_PNW, rows_PNW = rows_PNW.tensor_split([self.sketch_PMW.shape[1] - self.used], dim=1)
            self.sketch_PMW[:, self.used : self.used + taken_PNW.shape[1]] = taken_PNW
            self.used += taken_PNW.shape[1]

    def _shrink(self) -> None:
        rank = self.vectors_PWR.shape[2]
        _, values_PM, directions_PMW = torch.linalg.svd(self.sketch_PMW, full_matrices=False)
        # A sketch of at most R distinct directions loses nothing.
        lowest_P = values_PM[:, rank] if values_PM.shape[1] > rank else torch.zeros_like(values_PM[:, 0])
        left_PR = (values_PM.square() - lowest_P.square()[:, None]).clamp(min=0).sqrt()[:, :rank]
        self.sketch_PMW.zero_()
        self.sketch_PMW[:, : left_PR.shape[1]] = left_PR[:, :, None] * directions_PMW[:, :rank]
        self.used = rank

    def propose(self, new: NewRows, stored_PRR: Tensor, learning_rate: float, share: float = 1.0) -> Tensor | None:
        """The sketch's leading directions V, filled up from U where it has seen fewer than R, and turned within their span
        to be next to U; for a share of the step orth((1 − share) U + share · V VᵀU).

        There is no step to scale, so `learning_rate` does not matter.
        """
        leading_PWR = self._leading()
        refused = f"{self.name}: the sketch's directions", "let the bases move by `tracker: oja`"
        there_PWR = leading_PWR @ (leading_PWR.mT @ self.vectors_PWR)
        if (there_PWR - self.vectors_PWR).abs().amax() < SMALLEST_MOVE:
            return None
        if share == 1:
            return orthonormal(leading_PWR @ nearest_rotation(leading_PWR.mT @ self.vectors_PWR), *refused)
        return orthonormal(torch.lerp(self.vectors_PWR, there_PWR, share), *refused)

    def _leading(self) -> Tensor:
        """R orthonormal directions: those that the sketch has seen, then directions of the present basis."""
        rank = self.vectors_PWR.shape[2]
        _, values_PM, directions_PMW = torch.linalg.svd(self.sketch_PMW, full_matrices=False)
        # Singular values below this are rounding, and their directions are arbitrary.
        least_P1 = values_PM[:, :1] * max(self.sketch_PMW.shape[1:]) * torch.finfo(values_PM.dtype).eps
        is_seen_PR = values_PM[:, :rank] > least_P1
        leading_PWR = directions_PMW[:, :rank].mT
        if is_seen_PR.all():
            return leading_PWR
        seen_PWR = leading_PWR * is_seen_PR[:, None]
        outside_PWR = self.vectors_PWR - seen_PWR @ (seen_PWR.mT @ self.vectors_PWR)
        # Where more of U is left than there is room for, its leading columns are preferred.
        preference_R = torch.linspace(1, 0.5, rank, dtype=outside_PWR.dtype, device=outside_PWR.device)
        rest_PWR = torch.linalg.svd(outside_PWR * preference_R, full_matrices=False).U
        is_missing_PR = torch.arange(rank, device=is_seen_PR.device) < (~is_seen_PR).sum(dim=1, keepdim=True)
        taken_P2R = torch.cat([is_seen_PR, is_missing_PR], dim=1)
        return torch.cat([seen_PWR, rest_PWR], dim=2).mT[taken_P2R].view_as(leading_PWR.mT).mT

    def defer(self, new: NewRows) -> None:
        pass  # the sketch has seen them

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield self.sketch_PMW

    def clone(self) -> Self:
        twin = super().clone()
        twin.sketch_PMW = self.sketch_PMW.clone()
        return twin


def orthonormal(matrix_PWR: Tensor, what: str, remedy: str) -> Tensor:
    """The Q factor of each part, its columns pointing as the given ones did.

    Raises:
        UserError: the matrix is not finite, or its columns are dependent. `what` and `remedy` are the message.
    """
    # A small step leaves the columns nearly orthonormal, AᵀA with a condition of 3 at most. Its Cholesky factor is then as
    # exact as a QR, and four times as fast.
    gram_PRR = matrix_PWR.mT @ matrix_PWR
    away_P = (gram_PRR - identity_like(gram_PRR)).square().sum(dim=(1, 2))
    if away_P.amax() < 0.25:
        return torch.linalg.solve_triangular(torch.linalg.cholesky(gram_PRR).mT, matrix_PWR, upper=True, left=False)
    if torch.isfinite(matrix_PWR).all():
        q_PWR, r_PRR = torch.linalg.qr(matrix_PWR)
        diagonal_PR = r_PRR.diagonal(dim1=1, dim2=2)
        if (diagonal_PR.abs() > 1e-6 * diagonal_PR.abs().amax(dim=1, keepdim=True)).all():
            return q_PWR * diagonal_PR.sign()[:, None, :]
    raise UserError(f"{what} left no orthonormal basis; {remedy}")


def nearest_rotation(matrix_PRR: Tensor) -> Tensor:
    """The orthogonal factor Q of each part's polar decomposition. Where the matrix is VᵀU, V Q spans what V spans, and is as
    near to U as can be."""
    left_PRR, _, right_PRR = torch.linalg.svd(matrix_PRR)
    return left_PRR @ right_PRR


def _lifted(moment_PRR: Tensor) -> Tensor:
    """The moment with its smallest eigenvalues lifted, so that it can be inverted."""
    floor_P = (ENERGY_FLOOR * moment_PRR.diagonal(dim1=1, dim2=2).amax(dim=1)).clamp(
        min=torch.finfo(torch.float32).tiny
    )
    return moment_PRR + floor_P[:, None, None] * identity_like(moment_PRR)
