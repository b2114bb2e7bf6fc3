"""A compressed cache layer with a state of its own for each sequence."""

import abc
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from lowrank.hf.layer import CompressedLayer


class SequenceState(Protocol):
    """One sequence's compressed keys and values in one layer."""

    length: int

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""

    def clone(self) -> "SequenceState":
        """An independent copy."""

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of all state held between steps, each byte once; kinds as in :mod:`lowrank.memory`."""


class SequenceLayer(CompressedLayer):
    """A layer whose sequences know nothing of one another."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.sequences: list[SequenceState] = []

    @abc.abstractmethod
    def new_sequence(self) -> SequenceState:
        """An empty state for one sequence, once :attr:`dtype`, :attr:`device` and :attr:`head_dim` are known."""

    def start(self) -> None:
        self.sequences = [self.new_sequence() for _ in range(self.batch_size)]

    def get_seq_length(self) -> int:
        return self.sequences[0].length if self.sequences else 0

    def shorten(self, length: int) -> None:
        for sequence in self.sequences:
            sequence.crop(length)

    def select(self, rows: list[int]) -> None:
        # The first beam to follow a sequence takes its state over; only further ones cost a copy.
        taken: set[int] = set()
        picked = []
        for row in rows:
            picked.append(self.sequences[row].clone() if row in taken else self.sequences[row])
            taken.add(row)
        self.sequences = picked

    def clear(self) -> None:
        self.sequences = []

    def fork(self, memo: dict) -> None:
        self.sequences = [sequence.clone() for sequence in self.sequences]

    def held(self) -> Iterator[tuple[str, Tensor]]:
        for sequence in self.sequences:
            yield from sequence.held()
