"""Which tokens of a cache layer are a prompt, and the queries of a prompt that is not complete.

Shapes: B batch, H query heads, Q queries of a call, D head dim.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt, or the chunk of one that a call brings, with the queries that choose which of its tokens are kept.

    Attributes:
        start, end: the position of its first token, and the position after its last.
        query_BHQD: queries of consecutive tokens; None where none are left, or none are needed.
        query_end: the position after the last of them.
    """

    start: int
    end: int
    query_BHQD: Tensor | None
    query_end: int

    def cropped(self, length: int) -> "Prompt | None":
        """The prompt of a cache that keeps its first `length` tokens; None where none of its tokens is left."""
        if length <= self.start:
            return None
        query_BHQD, query_end = self.query_BHQD, min(self.query_end, length)
        if query_BHQD is not None and query_end < self.query_end:
            num_left = query_BHQD.shape[2] - (self.query_end - query_end)
            query_BHQD = query_BHQD[:, :, :num_left].clone() if num_left > 0 else None
        return Prompt(self.start, min(self.end, length), query_BHQD, query_end)

    def of_sequence(self, b: int) -> "Prompt":
        """The prompt of one sequence; its queries are a view."""
        if self.query_BHQD is None:
            return self
        return dataclasses.replace(self, query_BHQD=self.query_BHQD[b : b + 1])

    def select(self, rows: list[int]) -> "Prompt":
        """The prompt of the sequences at `rows`, in that order; its queries are a copy."""
        if self.query_BHQD is None:
            return self
        return dataclasses.replace(self, query_BHQD=self.query_BHQD[rows])


class PromptTracker:
    """Follows a layer's calls and says which of their tokens are a prompt.

    `generate()` declares the positions of its prompt, which may arrive in several calls and with drafts behind it. Where
    nobody declares one, each call of more than :data:`MAX_DECODE_QUERIES` tokens is a prompt, unless they may be drafts.

    Attributes:
        start, end: positions between which the declared prompt lies; both 0 where none is declared.
        record_past: whether the tokens of any call may be cropped right after it.
    """

    def __init__(self):
        self._unfinished: Prompt | None = None  # the declared prompt and its last queries so far, until it is complete
        self.expect(0, 0)

    def expect(self, start: int, end: int) -> None:
        """A `generate()` declares its prompt. Whether an earlier one drafted does not matter any more."""
        self.start, self.end, self.record_past, self._unfinished = start, end, False, None

    def clear(self) -> None:
        """Forget everything."""
        self.expect(0, 0)

    def prompt_at(self, first: int, length: int) -> tuple[int, int] | None:
        """The start and end of the prompt to which a call's first token belongs; None where it belongs to none.

        Args:
            first: position of the call's first token.
            length: tokens in the cache, the call's included.
        """
        if first < self.end:
            return self.start, self.end
        is_long = length - first > MAX_DECODE_QUERIES
        return (first, length) if is_long and not self.record_past else None

    def completed(self, query_BHQD: Tensor, length: int, window: int) -> tuple[slice, Tensor] | None:
        """The prompt that a call completes. To be asked once in every call.

        Args:
            query_BHQD: the call's queries.
            length: tokens in the cache, the call's included.
            window: W, how many queries are wanted at most.

        Returns:
            The positions of the prompt's tokens, and its last queries (B, H, ≤ W, D), whichever calls brought them; None
            where more of the prompt is to come, or the call's tokens belong to no prompt.
        """
        first = length - query_BHQD.shape[2]
        prompt = self.prompt_at(first, length)
        if prompt is None:
            return None
        start, end = prompt
        last_BHWD = query_BHQD[:, :, : end - first][:, :, -window:]  # drafts may follow the prompt in the same call
        if self._unfinished is not None and self._unfinished.query_BHQD is not None:
            last_BHWD = torch.cat([self._unfinished.query_BHQD, last_BHWD], dim=2)[:, :, -window:]
        if length < end:
            # A copy, so that the other queries of the call are freed.
            self._unfinished = Prompt(start, end, last_BHWD.detach().clone(), length)
            return None
        self._unfinished = None
        return slice(start, end), last_BHWD

    def crop(self, length: int, old_length: int) -> None:
        """The layer keeps the first `length` of the `old_length` tokens it has."""
        is_incomplete = self.start <= length and old_length < self.end  # more of it is to come, after position `length`
        if length < self.end and not is_incomplete:
            self.start, self.end = min(self.start, length), length
        if self._unfinished is not None:
            self._unfinished = self._unfinished.cropped(length)

    def select(self, rows: list[int]) -> None:
        """Keep the sequences at `rows`, in that order, repeats allowed."""
        if self._unfinished is not None:
            self._unfinished = self._unfinished.select(rows)

    def tensors(self) -> Iterator[Tensor]:
        """The queries kept between calls."""
        if self._unfinished is not None and self._unfinished.query_BHQD is not None:
            yield self._unfinished.query_BHQD
