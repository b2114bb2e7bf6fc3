"""Bits by water-filling, and the codebooks that say what a bit is worth."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_kv.bases.bit_allocation import allocate_bits, next_saving
from lowrank_kv.bases.codebooks import distortion, lloyd_max, rounded_to
from lowrank_kv.utils.errors import UserError

# Max (1960), table I: distortion of the best quantizers of normal numbers.
NORMAL = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}


def normal_quantiles(count: int) -> torch.Tensor:
    return torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)


@pytest.mark.parametrize(("bits", "expected"), NORMAL.items())
def test_codebooks_of_normal_numbers_are_those_of_the_tables(bits, expected):
    sample = normal_quantiles(400_000)
    levels = lloyd_max(sample, bits)
    assert levels.shape == (2**bits,)
    assert (levels.diff() > 0).all()
    assert distortion(sample.float(), levels) == pytest.approx(expected, rel=0.01)


def test_every_level_is_the_mean_of_what_it_stands_for():
    sample = torch.randn(50_000, generator=torch.Generator().manual_seed(0)).pow(3)
    levels = lloyd_max(sample, 3)
    rounded = rounded_to(sample, levels)
    for level in levels:
        assert float(sample[rounded == level].mean()) == pytest.approx(float(level), abs=2e-3 * float(sample.std()))


@pytest.mark.parametrize("sample", [torch.zeros(5), torch.ones(1), torch.tensor([0.0, 1.0])])
def test_fewer_numbers_than_levels_are_kept_exactly(sample):
    levels = lloyd_max(sample, 3)
    assert torch.isfinite(levels).all()
    torch.testing.assert_close(rounded_to(sample, levels), sample)


DISTORTIONS = {1: 0.4, 2: 0.13, 3: 0.04, 16: 1e-6}


def cost(importances, widths):
    known = {0: 1.0, **DISTORTIONS}
    rows = zip(importances, widths, strict=True)
    return sum(float(w) * known[b] for row, bits in rows for w, b in zip(row, bits, strict=True))


def num_bytes(widths, overhead):
    return sum(-(-(sum(row) + overhead) // 8) for row in widths)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), budget=st.integers(2, 9))
def test_no_other_widths_of_as_many_bytes_cost_less(seed, budget):
    """Against all allocations of a small case that are as large; steps of whole bits leave at most one step unspent."""
    generator = torch.Generator().manual_seed(seed)
    importances = [torch.rand(3, generator=generator).pow(4).sort(descending=True).values]
    widths = allocate_bits(importances, DISTORTIONS, budget, overhead=8)
    assert num_bytes(widths, 8) <= budget
    assert widths[0] == sorted(widths[0], reverse=True)
    spent = sum(widths[0])
    others = [each for each in itertools.product((0, *DISTORTIONS), repeat=3) if sum(each) <= spent and max(each)]
    assert cost(importances, widths) <= min(cost(importances, [each]) for each in others) + 1e-9


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), budget=st.integers(4, 14), rebuild_cost=st.sampled_from([0.5, 2.0, 6.0]))
def test_no_other_widths_cost_less_with_what_rebuilding_counts_for(seed, budget, rebuild_cost):
    """Against all allocations of two rows, of which one counts; both counts are of bits."""
    generator = torch.Generator().manual_seed(seed)
    importances = [torch.rand(2, generator=generator).pow(4).sort(descending=True).values for _ in range(2)]
    chosen = allocate_bits(importances, DISTORTIONS, budget, overhead=8, rebuild_costs=[rebuild_cost, 0.0])

    def work(widths):
        return sum(map(sum, widths)) + rebuild_cost * sum(bits > 0 for bits in widths[0])

    assert num_bytes(chosen, 8) <= budget
    rows = list(itertools.product((0, *DISTORTIONS), repeat=2))
    others = [each for each in itertools.product(rows, rows) if work(each) <= work(chosen) and all(map(max, each))]
    assert cost(importances, chosen) <= min(cost(importances, each) for each in others) + 1e-9


def test_dear_rebuilding_makes_fewer_coefficients_of_more_bits():
    importances = [torch.linspace(1, 0.01, 64).pow(3)] * 2
    rows = [
        allocate_bits(importances, DISTORTIONS, 40, overhead=8, rebuild_costs=[rebuild_cost, 0.0])
        for rebuild_cost in (0.0, 2.0, 8.0)
    ]
    kept = [sum(bits > 0 for bits in keys) for keys, _ in rows]
    assert kept[0] > kept[1] > kept[2]
    assert max(rows[2][0]) >= max(rows[0][0])
    assert all(38 <= num_bytes(each, 8) <= 40 for each in rows)
    assert rows[0] == allocate_bits(importances, DISTORTIONS, 40, overhead=8)


def test_a_budget_is_spent_to_the_byte_and_shared_by_importance():
    importances = [torch.linspace(scale, 0, 64) for scale in (1.0, 10.0)]
    widths = allocate_bits(importances, DISTORTIONS, 40, overhead=8)
    assert 38 <= num_bytes(widths, 8) <= 40
    assert sum(widths[1]) > 1.5 * sum(widths[0]) > 0


def test_widths_that_are_never_worth_their_bits_are_not_used():
    useless = {1: 0.9, 2: 0.1}  # the second bit saves more than the first
    widths = allocate_bits([torch.linspace(1, 0.1, 40)], useless, 5, overhead=8)
    assert set(widths[0]) == {0, 2}


def test_every_row_keeps_a_coefficient_and_a_budget_below_that_is_refused():
    importances = [torch.ones(8), torch.full((8,), 1e-12)]
    assert all(sum(row) for row in allocate_bits(importances, DISTORTIONS, 8, overhead=8))
    with pytest.raises(UserError, match="a budget of 3 bytes for 2 rows .* at least 4 are needed"):
        allocate_bits(importances, DISTORTIONS, 3, overhead=8)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), budget=st.integers(4, 40))
def test_the_next_bit_is_worth_what_it_would_save_at_most(seed, budget):
    """Against all widths that any coefficient could have instead."""
    importances = list(
        torch.rand(2, 12, generator=torch.Generator().manual_seed(seed)).pow(4).sort(descending=True).values
    )
    widths = allocate_bits(importances, DISTORTIONS, budget, overhead=8)
    known = {0: 1.0, **DISTORTIONS}
    expected = max(
        float(w) * (known[bits] - known[more]) / (more - bits)
        for row, taken in zip(importances, widths, strict=True)
        for w, bits in zip(row, taken, strict=True)
        for more in known
        if more > bits
    )
    assert next_saving(importances, DISTORTIONS, widths) == pytest.approx(expected)


def test_where_all_have_the_most_bits_another_saves_nothing():
    assert next_saving([torch.ones(3)], DISTORTIONS, [[16, 16, 16]]) == 0
