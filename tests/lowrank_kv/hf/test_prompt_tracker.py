"""Which tokens of a layer are a prompt, by positions."""

import torch

from lowrank_kv.hf.cache.prompt_tracker import PromptTracker


def queries(start: int, end: int) -> torch.Tensor:
    """(1, 1, Q, 1), each the position of its token."""
    return torch.arange(start, end, dtype=torch.float32)[None, None, :, None]


def call(tracker: PromptTracker, start: int, end: int):
    completed = tracker.completed(queries(start, end), end, window=4)
    return None if completed is None else (completed[0], completed[1].flatten().tolist())


def test_where_nobody_declares_a_prompt_long_calls_are_one_unless_they_may_be_drafts():
    tracker = PromptTracker()
    assert call(tracker, 0, 16) is None
    assert call(tracker, 16, 40) == (slice(16, 40), [36, 37, 38, 39])
    tracker.record_past = True
    assert call(tracker, 40, 80) is None


def test_a_declared_prompt_is_complete_with_its_last_token_and_has_the_queries_of_all_its_calls():
    tracker = PromptTracker()
    tracker.expect(5, 30)
    assert call(tracker, 5, 20) is None
    assert call(tracker, 20, 28) is None
    assert [tensor.shape[2] for tensor in tracker.tensors()] == [4]
    # Three drafts come with its last tokens.
    assert call(tracker, 28, 33) == (slice(5, 30), [26, 27, 28, 29])
    assert not list(tracker.tensors())
    assert call(tracker, 33, 40) is None


def test_a_crop_before_the_end_keeps_the_prompt_and_drops_the_queries():
    tracker = PromptTracker()
    tracker.expect(0, 30)
    assert call(tracker, 0, 20) is None
    tracker.crop(18, old_length=20)
    assert call(tracker, 18, 30) == (slice(0, 30), [26, 27, 28, 29])
    assert call(tracker, 30, 31) is None


def test_queries_on_both_sides_of_a_crop_are_joined():
    tracker = PromptTracker()
    tracker.expect(0, 21)
    assert call(tracker, 0, 20) is None
    tracker.crop(18, old_length=20)
    assert call(tracker, 18, 20) is None
    assert call(tracker, 20, 21) == (slice(0, 21), [17, 18, 19, 20])


def test_a_complete_prompt_that_is_cropped_ends_there():
    tracker = PromptTracker()
    tracker.expect(5, 30)
    assert call(tracker, 5, 30) is not None
    tracker.crop(20, old_length=30)
    assert (tracker.start, tracker.end) == (5, 20)
    tracker.crop(2, old_length=20)
    assert (tracker.start, tracker.end) == (2, 2)
    assert call(tracker, 2, 10) is None
