"""Stored coefficients when their basis moves.

Shapes: P parts, N rows, R rank.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lowrank_kv.stores.coefficients import Coefficients


def moment(
    coef: Coefficients, coef_scale_PR: Tensor | None = None, *, start: int = 0, end: int | None = None
) -> Tensor:
    """Σ cᵀc of the rows from `start` to `end`, or all, (P, R, R) fp32.

    Args:
        coef_scale_PR: the scale that the rows were divided by to be held as integers; None where they were not.
    """
    parts = coef.rows(0, 0).shape[0]
    zero_PRR = torch.zeros(parts, coef.rank, coef.rank, dtype=torch.float32, device=coef.device)
    return sum((tile_PNR.mT @ tile_PNR for tile_PNR in _tiles(coef, coef_scale_PR, start, end)), start=zero_PRR)


def identity_like(matrix_PRR: Tensor) -> Tensor:
    """The identity (R, R) in a matrix's dtype, on its device."""
    return torch.eye(matrix_PRR.shape[-1], dtype=matrix_PRR.dtype, device=matrix_PRR.device)


def energy_of(moment_PRR: Tensor) -> float:
    """The energy Σ ‖c‖² of the rows in a moment Σ cᵀc."""
    return float(moment_PRR.diagonal(dim1=1, dim2=2).sum())


def change_basis(
    coef: Coefficients, step_PRR: Tensor, capacity: int, coef_scale_PR: Tensor | None = None
) -> tuple[Coefficients, float]:
    """The rows in the new basis, c − c · `step_PRR`, with room for `capacity` rows.

    Args:
        step_PRR: fp32 (:class:`~ojakv.step_guard.Move`).
        coef_scale_PR: as for :func:`moment`.

    Returns:
        The rows, and by how much rounding has moved them, Σ ‖·‖²: measured for integers, 0 for floating dtypes, which have
        a bound.
    """
    if coef.quantization is None and coef.dtype == step_PRR.dtype:  # written in place, without a copy
        rows_PNR = coef.rows()
        room_PNR = rows_PNR.new_empty(rows_PNR.shape[0], capacity, coef.rank)
        torch.baddbmm(rows_PNR, rows_PNR, step_PRR, alpha=-1, out=room_PNR[:, : coef.length])
        moved = Coefficients.from_rows(room_PNR)
        moved.crop(coef.length)
        return moved, 0.0
    moved, rounded = coef.clone(rows=0), 0.0
    moved.reserve(capacity)
    for tile_PNR in _tiles(coef, coef_scale_PR):
        tile_PNR = torch.baddbmm(tile_PNR, tile_PNR, step_PRR, alpha=-1)
        start = moved.length
        moved.append(tile_PNR if coef_scale_PR is None else tile_PNR / coef_scale_PR[:, None])
        if coef.quantization is not None:
            (held_PNR,) = _tiles(moved, coef_scale_PR, start)
            rounded += float((held_PNR - tile_PNR).square().sum())
    return moved, rounded


def _tiles(
    coef: Coefficients, coef_scale_PR: Tensor | None, start: int = 0, end: int | None = None
) -> Iterator[Tensor]:
    """The rows as they were before they were scaled, fp32."""
    for _, rows_PNR in coef.tiles(start, end):
        yield rows_PNR.float() if coef_scale_PR is None else rows_PNR.float() * coef_scale_PR[:, None]
