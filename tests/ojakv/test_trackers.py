"""Fixed, Oja and Frequent Directions bases on synthetic streams."""

import pytest
import torch

from evaluation.subspace_metrics import relative_error, subspace_overlap
from lowrank_kv.utils.errors import UserError
from ojakv import trackers
from ojakv.trackers import FrequentDirections, NewRows, OjaTracker

WIDTH, RANK = 24, 6


def orthogonal(seed: int, rank: int = WIDTH) -> torch.Tensor:
    matrix = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(matrix).Q[:, :rank]


def stream(basis_WW: torch.Tensor, count: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Rows whose energy falls by a factor of 2 from each direction to the next, (1, N, W)."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, WIDTH, generator=generator) * scale * 2.0 ** -torch.arange(WIDTH) @ basis_WW.T)[None]


def follow(tracker, rows_PNW: torch.Tensor, rate: float = 1.0) -> None:
    """Feed rows 32 at a time, weighed against coefficients that are slowly forgotten."""
    stored = torch.zeros(1, RANK, RANK)
    for batch in rows_PNW.split(32, dim=1):
        tracker.observe(batch)
        old = tracker.vectors_PWR
        new = tracker.propose(NewRows(batch), stored, rate)
        if new is not None:
            tracker.move_to(new)
            turn = old.mT @ new
            stored = turn.mT @ stored @ turn
        coef = batch @ tracker.vectors_PWR
        stored = 0.9 * stored + coef.mT @ coef


def test_the_plain_step_is_the_papers_formula():
    rows = stream(orthogonal(1), 50, 4)
    u = orthogonal(0, RANK)
    moment = rows[0].T @ rows[0] / 50
    expected = torch.linalg.qr(u + 0.1 * (moment @ u - u @ u.T @ moment @ u)).Q
    tracker = OjaTracker(u[None], "rows", preconditioned=False)
    actual = tracker.propose(NewRows(rows), torch.zeros(1, RANK, RANK), 0.1)[0]
    torch.testing.assert_close(actual @ actual.T, expected @ expected.T, atol=1e-5, rtol=0)


def test_a_preconditioned_step_is_an_orthogonal_iteration_on_all_rows():
    # Stored rows lie in the span, so the moment of stored and new rows together is known.
    u = orthogonal(0, RANK)
    stored_rows = torch.randn(200, RANK, generator=torch.Generator().manual_seed(5)) @ u.T
    rows = stream(orthogonal(1), 50, 4)
    moment = stored_rows.T @ stored_rows + rows[0].T @ rows[0]
    expected = torch.linalg.qr(moment @ u).Q
    coef = stored_rows @ u
    tracker = OjaTracker(u[None], "rows", preconditioned=True)
    actual = tracker.propose(NewRows(rows), (coef.T @ coef)[None], 1.0)[0]
    torch.testing.assert_close(actual @ actual.T, expected @ expected.T, atol=1e-4, rtol=0)


@pytest.mark.parametrize("preconditioned", [True, False])
def test_a_basis_stays_orthonormal_over_a_thousand_updates(preconditioned):
    tracker = OjaTracker(orthogonal(0, RANK)[None], "rows", preconditioned=preconditioned)
    follow(tracker, stream(orthogonal(1), 32 * 1000, 6).bfloat16().float(), rate=0.5)
    gram = tracker.vectors_PWR[0].T @ tracker.vectors_PWR[0]
    torch.testing.assert_close(gram, torch.eye(RANK), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rank", [2, 3, RANK])
def test_frequent_directions_meets_its_bound(rank):
    # Flat spectra are the hard case: every shrink loses something of all directions.
    rows = torch.randn(3000, WIDTH, generator=torch.Generator().manual_seed(7)) * torch.linspace(1, 0.5, WIDTH)
    tracker = FrequentDirections(orthogonal(0, RANK)[None], "rows", energy_PR=torch.ones(1, RANK), prior_rows=0)
    for batch in rows.split(17):
        tracker.observe(batch[None])
    basis = tracker.propose(NewRows(rows[None]), torch.zeros(1, RANK, RANK), 1.0)[0, :, :rank]
    energies = torch.linalg.svdvals(rows.double()).square()
    left = relative_error(rows, basis) * float(energies.sum())
    assert left <= (1 + rank / (RANK + 1 - rank)) * float(energies[rank:].sum()) * (1 + 1e-5)
    # ‖AᵀA − BᵀB‖₂ ≤ ‖A − A_k‖²_F / (R + 1 − k), the sketch's own guarantee.
    sketch = tracker.sketch_PMW[0].double()
    gap = torch.linalg.matrix_norm(rows.double().T @ rows.double() - sketch.T @ sketch, ord=2)
    assert float(gap) <= float(energies[rank:].sum()) / (RANK + 1 - rank) * (1 + 1e-5)


def test_frequent_directions_is_exact_on_what_fits():
    basis = orthogonal(1, RANK)
    rows = torch.randn(500, RANK, generator=torch.Generator().manual_seed(8)) @ basis.T
    tracker = FrequentDirections(orthogonal(0, RANK)[None], "rows", energy_PR=torch.ones(1, RANK), prior_rows=0)
    for batch in rows.split(32):
        tracker.observe(batch[None])
    assert relative_error(rows, tracker.propose(NewRows(rows[None]), None, 1.0)[0]) < 1e-6


def sketch_without_prior(start: torch.Tensor) -> FrequentDirections:
    return FrequentDirections(start[None], "rows", energy_PR=torch.ones(1, start.shape[1]), prior_rows=0)


@pytest.mark.parametrize(
    "make", [sketch_without_prior, lambda start: OjaTracker(start[None], "rows", preconditioned=True)]
)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_directions_that_no_row_was_seen_in_stay(make, share):
    # Three rows near the basis say nothing of its other directions, and nothing else is known.
    start = orthogonal(0, RANK)
    generator = torch.Generator().manual_seed(11)
    seen = torch.randn(3, RANK, generator=generator) @ start.T
    rows = (seen + 0.02 * torch.randn(3, WIDTH, generator=generator))[None]
    tracker = make(start)
    tracker.observe(rows)
    found = tracker.propose(NewRows(rows), torch.zeros(1, RANK, RANK), 1.0, share)[0]
    assert subspace_overlap(found, start) > 0.99
    torch.testing.assert_close(found.T @ found, torch.eye(RANK), atol=1e-5, rtol=0)
    unseen = start @ torch.linalg.svd(rows[0] @ start).Vh[3:].T
    assert float((found.T @ unseen).square().sum()) > 0.99 * (RANK - 3)
    if share == 1:
        assert relative_error(rows[0], found) < 1e-6


def test_a_sketch_that_has_seen_rows_elsewhere_keeps_the_leading_columns_of_its_basis():
    both = orthogonal(0)
    start, elsewhere = both[:, :RANK], both[:, RANK : RANK + 2]
    parts = torch.stack([start, start, start])
    tracker = FrequentDirections(parts, "rows", energy_PR=torch.ones(3, RANK), prior_rows=0)
    # One part sees two directions outside of its basis, one nothing, one more than it has room for.
    noise = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(12))
    rows = torch.stack([noise[:, :2] @ elsewhere.T, torch.zeros(9, WIDTH), noise])
    tracker.observe(rows)
    outside, nothing, all_new = tracker.propose(NewRows(rows), torch.zeros(3, RANK, RANK), 1.0)
    expected = torch.cat([elsewhere, start[:, : RANK - 2]], dim=1)
    assert subspace_overlap(outside, expected) == pytest.approx(1, abs=1e-6)
    assert subspace_overlap(nothing, start) == pytest.approx(1, abs=1e-6)
    best = torch.linalg.svd(rows[2]).Vh[:RANK].T
    assert subspace_overlap(all_new, best) == pytest.approx(1, abs=1e-4)
    assert sketch_without_prior(start).propose(NewRows(rows[1:2]), None, 1.0) is None


@pytest.mark.parametrize("kind", ["small-step", "large-step", "steep", "leaning"])
def test_columns_are_made_orthonormal_without_turning_them_round(kind):
    noise = torch.randn(WIDTH, RANK, generator=torch.Generator().manual_seed(9)) / WIDTH**0.5
    matrix = {
        "small-step": orthogonal(0, RANK) + 0.02 * noise,
        "large-step": orthogonal(0, RANK) + 3 * noise,
        "steep": noise * torch.logspace(0, -3, RANK),
        # The diagonal of its Cholesky factor is all ones.
        "leaning": orthogonal(0, RANK) @ (torch.eye(RANK) + torch.triu(torch.full((RANK, RANK), 10.0), 1)),
    }[kind]
    exact = torch.linalg.qr(matrix.double())
    actual = trackers.orthonormal(matrix[None], "rows", "take others")[0].double()
    torch.testing.assert_close(actual.T @ actual, torch.eye(RANK, dtype=torch.float64), atol=1e-6, rtol=0)
    # A leaning matrix's own rounding moves its last directions.
    tolerance = 2e-2 if kind == "leaning" else 1e-5
    torch.testing.assert_close(actual, exact.Q * exact.R.diagonal().sign(), atol=tolerance, rtol=0)


def test_a_step_that_leaves_no_basis_names_its_rate():
    tracker = OjaTracker(orthogonal(0, RANK)[None], "layer 3 keys", preconditioned=False)
    with pytest.raises(UserError, match=r"layer 3 keys: an Oja step of rate 1e\+38 left no orthonormal basis"):
        tracker.propose(NewRows(stream(orthogonal(1), 50, 4, 1e3)), torch.zeros(1, RANK, RANK), 1e38)


@pytest.mark.parametrize("kind", ["oja", "sketch"])
def test_a_copy_moves_alone(kind):
    start = orthogonal(0, RANK)[None]
    if kind == "oja":
        tracker = OjaTracker(start, "rows", preconditioned=True)
    else:
        tracker = FrequentDirections(start, "rows", energy_PR=torch.ones(1, RANK), prior_rows=8)
    rows = stream(orthogonal(1), 320, 9)
    follow(tracker, rows)
    before = tracker.vectors_PWR.clone()
    twin = tracker.clone()
    assert not {t.data_ptr() for t in twin.tensors()} & {t.data_ptr() for t in tracker.tensors()}
    follow(twin, stream(orthogonal(2), 320, 10))
    assert torch.equal(tracker.vectors_PWR, before)
    assert not torch.allclose(twin.vectors_PWR, before, atol=1e-2)
