"""A compressed cache layer with a state of its own for each sequence.

Shapes: B batch, H query heads, Q queries of a call, W last queries of a prompt, D head dim, T tokens seen.
"""

import abc
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from lowrank_kv.eviction import check_croppable
from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES, CompressedLayer
from lowrank_kv.stores.memory_report import BUFFERS


class SequenceState(Protocol):
    """One sequence's compressed keys and values in one layer."""

    length: int
    fixed: int  # tokens that can no longer be cropped: some of them are evicted

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, at least the fixed ones."""

    def clone(self) -> "SequenceState":
        """An independent copy."""

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of all state held between steps, each byte once; kinds as in `stores.memory_report`."""


class SequenceLayer(CompressedLayer):
    """A layer whose sequences know nothing of one another.

    Attributes:
        prompt_start, prompt_end: places between which the prompt of the running `generate()` lies; both 0 where nobody said.
        record_past: whether tokens of any call may be cropped right after it.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.sequences: list[SequenceState] = []
        self._expect_nothing()

    def _expect_nothing(self) -> None:
        self.prompt_start = self.prompt_end = 0
        self.record_past = False
        self._last_query_BHWD: Tensor | None = None  # of a prompt of which more is to come

    @abc.abstractmethod
    def new_sequence(self) -> SequenceState:
        """An empty state for one sequence, once :attr:`dtype`, :attr:`device` and :attr:`head_dim` are known."""

    def start(self) -> None:
        self.sequences = [self.new_sequence() for _ in range(self.batch_size)]

    @property
    def sequences(self) -> list[SequenceState]:
        return self._sequences

    @sequences.setter
    def sequences(self, sequences: list[SequenceState]) -> None:
        # The first by itself: a graph that found it in a list would serve just as many sequences as it has.
        self._sequences, self._first = sequences, sequences[0] if sequences else None

    def get_seq_length(self) -> int:
        return 0 if self._first is None else self._first.length

    def expect_prompt(self, length: int) -> None:
        # Drafts of an earlier `generate()` say nothing of this one, which records the past when it drafts.
        self._expect_nothing()
        start = self.get_seq_length()
        if length > start + 1:  # a single token after others goes on with what was begun
            self.prompt_start, self.prompt_end = start, length

    def activate_past_recording(self) -> None:
        """Until the next `generate()` the tokens of any call may be cropped right after it."""
        self.record_past = True

    def finished_prompt(self, query_BHQD: Tensor, window: int) -> tuple[slice, Tensor] | None:
        """To be asked once in every call, when its tokens are stored: the prompt that they complete.

        Where no `generate()` says which tokens are one, those of a call of more than :data:`MAX_DECODE_QUERIES` are, unless
        they are drafts.

        Args:
            query_BHQD: the call's queries.
            window: W, the most queries wanted.

        Returns:
            the places of the prompt's tokens and its last queries, (B, H, ≤ W, D), whichever calls they came with; None
            where more of the prompt is to come, or the call's tokens belong to none.
        """
        end = self.get_seq_length()
        start = end - query_BHQD.shape[2]
        if start >= self.prompt_end:
            if query_BHQD.shape[2] <= MAX_DECODE_QUERIES or self.record_past:
                return None
            return slice(start, end), query_BHQD[:, :, -window:]
        last_BHWD = query_BHQD[:, :, : self.prompt_end - start][:, :, -window:]  # drafts may come with a prompt
        if self._last_query_BHWD is not None:
            last_BHWD = torch.cat([self._last_query_BHWD, last_BHWD], dim=2)[:, :, -window:]
        if end < self.prompt_end:
            self._last_query_BHWD = last_BHWD.detach().clone()  # not the whole call's
            return None
        self._last_query_BHWD = None
        return slice(self.prompt_start, self.prompt_end), last_BHWD

    def check_crop(self, length: int) -> None:
        super().check_crop(length)
        for sequence in self.sequences:
            check_croppable(length, sequence.fixed)

    def truncate(self, length: int) -> None:
        held = self.get_seq_length()
        for sequence in self.sequences:
            sequence.crop(length)
        if held < self.prompt_end and length >= self.prompt_start:
            # More of the prompt is to come, from where it now ends.
            if self._last_query_BHWD is not None:
                self._last_query_BHWD = self._last_query_BHWD[
                    :, :, : max(0, self._last_query_BHWD.shape[2] - held + length)
                ]
        elif length < self.prompt_end:
            self.prompt_start, self.prompt_end, self._last_query_BHWD = min(self.prompt_start, length), length, None

    def select(self, rows: list[int]) -> None:
        # The first beam to follow a sequence takes its state over; only further ones cost a copy.
        taken: set[int] = set()
        picked = []
        for row in rows:
            picked.append(self.sequences[row].clone() if row in taken else self.sequences[row])
            taken.add(row)
        self.sequences = picked
        if self._last_query_BHWD is not None:
            self._last_query_BHWD = self._last_query_BHWD[rows]

    def clear(self) -> None:
        self.sequences = []
        self._expect_nothing()

    def copy_state(self, memo: dict) -> None:
        self.sequences = [sequence.clone() for sequence in self.sequences]

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        for sequence in self.sequences:
            yield from sequence.tensors_by_kind()
        if self._last_query_BHWD is not None:
            yield BUFFERS, self._last_query_BHWD


def mask_of_row(mask: Tensor, b: int) -> Tensor:
    """One sequence's (Q, T) of a mask (B, 1, Q, T), or of one for all sequences alike, (1, 1, Q, T)."""
    return mask[b if mask.shape[0] > 1 else 0, 0]
