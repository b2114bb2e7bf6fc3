"""Intervals of means hold the mean as often as they say, of values and of clusters of values."""

import pytest
import torch

from lowrank_kv.utils.intervals import (
    LEAST_DOCUMENTS,
    clusters_of,
    interval,
    least_interval,
    squared_error,
    student_quantile,
)


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_an_interval_of_few_values_holds_the_mean_as_often_as_it_says(count):
    generator, hits = torch.Generator().manual_seed(0), 0
    for number in range(300):
        low, high = interval(torch.randn(count, dtype=torch.float64, generator=generator), seed=number)
        hits += bool(low <= 0 <= high)
    assert 0.91 < hits / 300 < 0.99  # 0.95, give or take three standard errors


def test_quantiles_of_students_distribution():
    """As tables have them, to the last of their digits or to what the function promises."""
    tabled = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582, 6: 2.446912, 7: 2.364624, 8: 2.306004}
    tabled |= {9: 2.262157, 10: 2.228139, 15: 2.131450, 20: 2.085963, 30: 2.042272, 60: 2.000298, 120: 1.979930}
    errors = {freedom: abs(student_quantile(freedom) - quantile) for freedom, quantile in tabled.items()}
    assert max(errors[freedom] for freedom in (1, 2)) < 1e-6
    assert errors[3] < 0.0039
    assert max(error for freedom, error in errors.items() if freedom > 3) < 0.0009


def test_an_interval_of_clusters_draws_them_together():
    values = torch.tensor([0.0, 0, 0, 1, 1, 1], dtype=torch.float64)
    clusters = torch.tensor([5, 5, 5, 9, 9, 9])
    half = student_quantile(1) / 1.959964 * 2**0.5 / 2  # of two values one apart, each may be drawn twice
    assert [float(each) for each in interval(values, cluster_N=clusters)] == pytest.approx([0.5 - half, 0.5 + half])
    apart = interval(values)
    assert 0 < apart[0] < apart[1] < 1
    assert interval(values, cluster_N=torch.arange(6)) == apart
    # Of two clusters a mean is that of the items drawn, not of the clusters' means.
    low, high = interval(torch.tensor([0.0, 1, 1, 1], dtype=torch.float64), cluster_N=torch.tensor([0, 1, 1, 1]))
    wider = 2 * half  # so much further from the mean, 0.75
    assert (float(low), float(high)) == pytest.approx((0.75 - 0.75 * wider, 0.75 + 0.25 * wider))


def test_values_of_one_document_are_one_cluster_where_there_are_enough_documents():
    many = [number // 2 for number in range(2 * LEAST_DOCUMENTS)]
    assert clusters_of([many]).tolist() == many
    assert clusters_of([many[2:]]).tolist() == list(range(len(many) - 2)), "of too few documents"
    assert clusters_of([]).tolist() == []


def test_documents_of_two_texts_are_never_one_cluster():
    many = [number // 2 for number in range(2 * LEAST_DOCUMENTS)]
    mixed = clusters_of([many, [0, 0, 0], many]).tolist()
    assert mixed == [*many, *(LEAST_DOCUMENTS + n for n in range(3)), *(LEAST_DOCUMENTS + 3 + n for n in many)]


def test_the_error_of_a_mean_is_that_of_the_means_of_its_clusters():
    value_N = torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    error, count = squared_error(value_N, torch.arange(30))
    assert (error, count) == (pytest.approx(float(value_N.var()) / 30), 30)
    error, count = squared_error(value_N, torch.arange(30) // 3)
    assert (error, count) == (pytest.approx(float(value_N.view(10, 3).mean(1).var()) / 10), 10)
    assert squared_error(value_N, torch.zeros(30)) == (float("inf"), 1)


@pytest.mark.parametrize(("value", "count"), [(0, 92), (100, 92), (0, 5)])
def test_equal_values_have_wilsons_interval(value, count):
    """The roots p of |p̂ − p| = z √(p (1 − p) / n)."""
    low, high = least_interval(value, count, (0, 100))
    assert (low, high) == (0, pytest.approx(high)) if value == 0 else (pytest.approx(low), 100)
    root = (high if value == 0 else 100 - low) / 100
    assert root == pytest.approx(1.959964 * (root * (1 - root) / count) ** 0.5)
    found = interval(torch.full((count,), float(value), dtype=torch.float64), possible=(0, 100))
    assert [float(each) for each in found] == pytest.approx([low, high])


def test_clusters_of_equal_means_say_no_more_than_as_many_equal_values():
    values, clusters = torch.tensor([0.0, 1, 1, 0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    assert [float(each) for each in interval(values, cluster_N=clusters)] == [0.5, 0.5]
    found = interval(values, cluster_N=clusters, possible=(0, 1))
    assert [float(each) for each in found] == pytest.approx(least_interval(0.5, 2, (0, 1)))
    assert 0 < float(found[0]) < 0.2


def test_one_other_value_does_not_make_an_interval_narrower():
    values = torch.zeros(92, dtype=torch.float64)
    _, none = interval(values, possible=(0, 1))
    values[0] = 0.1
    _, one = interval(values, possible=(0, 1))
    assert one > none
    many = torch.arange(92).double() % 2
    assert interval(many, possible=(0, 1)) == interval(many), "wide enough already"


def test_a_value_that_counts_twice_is_two_values_of_one_cluster():
    values, weights = torch.tensor([0.0, 0.2, 1.0], dtype=torch.float64), torch.tensor([2, 1, 1])
    twice = torch.tensor([0.0, 0.0, 0.2, 1.0], dtype=torch.float64)
    assert interval(values, weight_N=weights) == interval(twice, cluster_N=torch.tensor([0, 0, 1, 2]))
