"""Rows of tasks from their items' scores, by hand."""

import pytest
from byte_tokenizer import byte_tokenizer
from methods import tiny_model

from evaluation.tasks.building import tasks_of
from evaluation.tasks.item import ItemScore
from evaluation.tasks.registry import TaskConfig
from evaluation.tasks.rows import pooled, row_of


def test_items_of_tasks_that_stand_together_are_drawn_apart():
    model = tiny_model(vocab_size=257, max_position_embeddings=2048)
    configs = [TaskConfig(task=["lookup"], items=4, facts=facts, questions=2) for facts in (3, 4)]
    tasks = [tasks_of([config], model, byte_tokenizer(), None)[0] for config in configs]
    whole = pooled("both", tasks)
    assert whole.label == "both"
    assert [item.cluster for item in whole.items] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [item.context for item in whole.items] == [item.context for task in tasks for item in task.items]


def test_rows_by_hand():
    def scores(*values):
        return {
            number: ItemScore(score=value, values={"acc": value}, answer="", cache_bytes=1, full_bytes=4)
            for number, value in enumerate(values)
        }

    config = TaskConfig(task=["lookup"], items=4, facts=4, questions=2)
    [task] = tasks_of([config], tiny_model(vocab_size=257, max_position_embeddings=2048), byte_tokenizer(), None)
    row = row_of("m", task, scores(1, 0, 1, 0), scores(1, 1, 1, 0))
    assert row["score"] == 50
    assert row["difference"] == -25
    assert row["of_full"] == pytest.approx(100 * 2 / 3)
    assert row["rate"] == 0.25
    assert row["acc"] == 0.5
    # Both lists have one right of two: drawn as lists, the mean is never another, and two lists say little of others.
    assert row["clusters"] == 2
    assert (row["score_low"], row["score_high"]) == pytest.approx((50 - 50 * 0.6576, 50 + 50 * 0.6576), abs=0.01)
    assert (row["difference_low"], row["difference_high"]) == (-100, 100)  # of two lists: no more can be said
    assert row_of("m", task, scores(1, 0), scores(0, 0))["of_full"] is None


def test_no_interval_reaches_beyond_what_a_mean_can_be():
    names = {"kl 0–500": (0.001, 0.2), "top1 0–500": (0.99, 0.6)}
    scores = {
        n: ItemScore(
            score=n, values={name: of[n] for name, of in names.items()}, answer="", cache_bytes=1, full_bytes=4
        )
        for n in range(2)
    }
    config = TaskConfig(task=["lookup"], items=2, facts=4, questions=1)
    [task] = tasks_of([config], tiny_model(vocab_size=257, max_position_embeddings=2048), byte_tokenizer(), None)
    row = row_of("m", task, scores, scores)
    assert row["kl 0–500_low"] == 0 < row["kl 0–500_high"]
    assert row["top1 0–500_low"] < row["top1 0–500_high"] == 1


def test_a_row_of_items_that_all_fail_or_all_tie_has_an_interval():
    def scores(value):
        return {n: ItemScore(score=value, values={}, answer="", cache_bytes=1, full_bytes=4) for n in range(92)}

    config = TaskConfig(task=["lookup"], items=92, facts=4, questions=1)
    [task] = tasks_of([config], tiny_model(vocab_size=257, max_position_embeddings=2048), byte_tokenizer(), None)
    row = row_of("m", task, scores(0), scores(0))
    unmet = 100 * 1.959964**2 / (92 + 1.959964**2)  # Wilson's bound for 0 of 92, in per cent
    assert (row["score_low"], row["score_high"]) == pytest.approx((0, unmet))
    assert (row["difference_low"], row["difference_high"]) == pytest.approx((-unmet, unmet))
    whole = row_of("m", task, scores(1), scores(1))
    assert (whole["score_low"], whole["score_high"]) == pytest.approx((100 - unmet, 100))
    assert row_of("full", task, scores(0), scores(0))["difference_high"] == 0, "from itself"
