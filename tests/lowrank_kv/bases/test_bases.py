"""Moments, bases, metrics and rank allocation."""

import pytest
import torch

from evaluation.subspace_metrics import relative_error, subspace_overlap
from lowrank_kv.bases.moments import SecondMoment
from lowrank_kv.bases.pca import parts_of, pca_basis
from lowrank_kv.bases.rank_allocation import (
    check_rank,
    energy_curve,
    energy_rank,
    falling_means,
    uniform_ranks,
    waterfill_ranks,
)
from lowrank_kv.utils.errors import UserError


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(12, 12, generator=generator) * torch.logspace(0, -3, 12)
    return torch.randn(4000, 12, generator=generator) @ mixing.T


def test_streamed_moment_equals_the_whole(rows):
    moment = SecondMoment(12)
    for block in rows.view(4, 10, 100, 12):
        moment.update(block)
    assert moment.count == 4000
    torch.testing.assert_close(moment.mean(), rows.double().T @ rows.double() / 4000)


def test_moment_keeps_precision_over_many_rows():
    # In fp32 the sum would stop growing at 2²⁴.
    moment = SecondMoment(1)
    for _ in range(20):
        moment.update(torch.ones(2**20, 1))
    assert float(moment.sum_CC) == 20 * 2**20


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_moment_refuses_what_is_not_finite(bad):
    with pytest.raises(ValueError, match="NaN or infinite"):
        SecondMoment(2).update(torch.tensor([[1.0, bad]]))


def test_moment_refuses_to_average_nothing():
    with pytest.raises(ValueError, match="empty"):
        SecondMoment(2).mean()


def test_joint_basis_is_the_best_for_every_rank(rows):
    basis = pca_basis(parts_of(rows.T @ rows, layout="joint", num_heads=3))
    [vectors], [energy] = basis.vectors_PWW, basis.energy_PW
    singular = torch.linalg.svdvals(rows.double()).square()
    for rank in (1, 5, 12):
        best = float(singular[rank:].sum() / singular.sum())
        assert relative_error(rows, vectors[:, :rank]) == pytest.approx(best, abs=1e-6)
    assert torch.equal(energy, energy.sort(descending=True).values)


def test_per_head_bases_are_the_best_of_each_head(rows):
    basis = pca_basis(parts_of(rows.T @ rows, layout="per_head", num_heads=3))
    for head in range(3):
        head_rows = rows[:, head * 4 : (head + 1) * 4]
        singular = torch.linalg.svdvals(head_rows.double()).square()
        best = float(singular[2:].sum() / singular.sum())
        assert relative_error(head_rows, basis.vectors_PWW[head, :, :2]) == pytest.approx(best, abs=1e-6)


def test_an_unknown_layout_is_named(rows):
    with pytest.raises(UserError, match="joint, per_head; got 'rows'"):
        parts_of(rows.T @ rows, layout="rows", num_heads=3)


def test_subspace_overlap_of_known_planes():
    eye = torch.eye(4)
    assert subspace_overlap(eye[:, :2], eye[:, :2]) == pytest.approx(1)
    assert subspace_overlap(eye[:, :2], eye[:, 2:]) == pytest.approx(0)
    assert subspace_overlap(eye[:, :2], eye[:, 1:3]) == pytest.approx(0.5)


def test_uniform_ranks_meet_the_budget():
    ranks = uniform_ranks([192] * 60, 0.2731)
    assert abs(sum(ranks) - 0.2731 * 192 * 60) <= 1
    assert max(ranks) - min(ranks) <= 1


def test_waterfilling_loses_least_energy():
    energies = [torch.tensor([8.0, 1.0, 0.5, 0.5]), torch.tensor([4.0, 3.0, 2.0, 1.0])]
    assert waterfill_ranks(energies, 0.5) == [1, 3]
    assert waterfill_ranks(energies, 1.0) == [4, 4]
    assert waterfill_ranks([torch.tensor([1.0, 0.0]), torch.tensor([0.6, 0.4])], 0.01) == [1, 1]


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.77, 1.0])
def test_ranks_in_multiples_meet_the_budget(rate):
    widths = [64, 64, 40, 64, 192, 40] * 4
    generator = torch.Generator().manual_seed(0)
    spectra = [torch.rand(width, generator=generator).sort(descending=True).values for width in widths]
    for ranks in (uniform_ranks(widths, rate, 16), waterfill_ranks(spectra, rate, 16)):
        assert all(rank % 16 == 0 or rank == width for rank, width in zip(ranks, widths, strict=True))
        assert all(16 <= rank <= width for rank, width in zip(ranks, widths, strict=True))
        assert sum(ranks) == pytest.approx(rate * sum(widths), abs=16)


@pytest.mark.parametrize("allocate", [uniform_ranks, lambda *given: waterfill_ranks([torch.ones(64)] * 3, *given[1:])])
def test_multiples_that_exceed_the_budget_by_themselves_are_refused(allocate):
    with pytest.raises(
        UserError, match=r"multiples of 32 keep at least 0.50 of widths like 64, more than the rate 0.2"
    ):
        allocate([64] * 3, 0.2, 32)


def test_waterfilling_in_multiples_keeps_the_runs_worth_most():
    spectra = [torch.tensor([8.0, 1.0, 0.5, 0.5]), torch.tensor([4.0, 3.0, 2.9, 2.8])]
    assert waterfill_ranks(spectra, 0.75, 2) == [2, 4]
    assert waterfill_ranks(spectra, 0.5, 2) == [2, 2]


@pytest.mark.parametrize("tail", [0.0, 0.1])
def test_runs_that_are_worth_the_same_are_kept_from_the_first(tail):
    """A calibration of few tokens leaves most energies zero, and equal ones round."""
    spectra = [torch.cat([torch.linspace(1, 0.5, 3), torch.full((width - 3,), tail)]) for width in (20, 34, 13)]
    for rate in (0.3, 0.5, 0.8, 0.9, 0.95):
        ranks = waterfill_ranks(spectra, rate, 4)
        assert all(rank % 4 == 0 or rank == len(each) for rank, each in zip(ranks, spectra, strict=True)), (rate, ranks)


def test_a_curve_of_energy_rises_to_one_where_it_has_more_points_than_energies():
    assert energy_curve(torch.tensor([6.0, 3.0, 1.0]), 16) == pytest.approx([0.6, 0.9, 1.0])
    assert energy_curve(torch.tensor([6.0, 3.0, 1.0, 0.0]), 2) == pytest.approx([0.9, 1.0])


def test_energy_rank():
    energy = torch.tensor([6.0, 3.0, 1.0])
    assert [energy_rank(energy, share) for share in (0.5, 0.6, 0.61, 0.9, 0.95, 1.0)] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("rank", [0, 200])
def test_rank_out_of_range_names_the_range(rank):
    with pytest.raises(UserError, match=rf"1\.\.192 for this model, got {rank}"):
        check_rank(rank, 192)


def test_worths_made_to_fall_keep_their_sums():
    worth = torch.tensor([5.0, 1, 3, 2, 2, 7, 0, -1, 1])
    found = falling_means(worth)
    assert found.tolist() == [5.0, 3, 3, 3, 3, 3, 0, 0, 0]
    assert torch.equal(falling_means(found), found)
    # As many prefixes of two spectra as there are: none of them holds more than the one that water-filling takes.
    generator = torch.Generator().manual_seed(0)
    spectra = [torch.rand(7, generator=generator) for _ in range(2)]
    for budget in range(2, 14):
        ranks = waterfill_ranks([falling_means(spectrum) for spectrum in spectra], budget / 14)
        assert sum(ranks) == budget
        best = max(
            float(spectra[0][:a].sum() + spectra[1][: budget - a].sum())
            for a in range(max(1, budget - 7), min(7, budget - 1) + 1)
        )
        relaxed = sum(float(falling_means(s)[:rank].sum()) for s, rank in zip(spectra, ranks, strict=True))
        assert relaxed >= best - 1e-6
