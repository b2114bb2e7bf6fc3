"""A compressed cache layer that keeps a state for each sequence.

Shapes: B batch, Q queries of a call, T tokens seen.
"""

import abc
import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from lowrank_kv.eviction import Eviction, check_croppable, check_not_padded_right
from lowrank_kv.hf.cache.layer import CompressedLayer
from lowrank_kv.hf.cache.prompt_tracker import PromptTracker
from lowrank_kv.stores.memory_report import BUFFERS
from lowrank_kv.utils.errors import UserError


class SequenceState(Protocol):
    """One sequence's compressed keys and values in one layer."""

    length: int  # tokens seen
    min_crop_length: int  # the fewest tokens it can be cropped to: of these, some are evicted

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, at least :attr:`min_crop_length`."""

    def evict(self, score_PT: Tensor, prompt: slice, eviction: Eviction) -> None:
        """Forget the compressed tokens of a prompt that have the least scores, of keys and values alike, or none of them;
        see :meth:`Eviction.rows_kept` for the arguments."""

    def clone(self) -> "SequenceState":
        """An independent copy."""

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of all state held between steps, each byte once; kinds as in `stores.memory_report`."""


class SequenceLayer(CompressedLayer):
    """A layer whose sequences know nothing of one another.

    Attributes:
        prompts: says which tokens are a prompt; the same ones in all sequences.
    """

    saved = "sequences", "prompts"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.sequences: list[SequenceState] = []
        self.prompts = PromptTracker()

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
        # The first has its own attribute: a graph that found it in the list would be compiled for that number of sequences.
        self._sequences, self._first = sequences, sequences[0] if sequences else None

    def check_not_padded_right(self, mask: Tensor | None) -> None:
        """Raise :class:`UserError` where a call completes a prompt that its mask (B or 1, 1, Q, T) pads on the right: the
        last queries are to choose tokens. A chunk before may end in the padding on the left of what is to come."""
        if mask is None or mask.shape[2] == 1:
            return
        first, length = mask.shape[3] - mask.shape[2], mask.shape[3]
        start, end = self.prompts.prompt_at(first, length) or (first, length)
        if end <= length:
            for b in range(mask.shape[0]):
                check_not_padded_right(mask_of_sequence(mask, b)[:, start:end])

    def evict(
        self,
        query: Tensor,
        mask: Tensor | None,
        scaling: float,
        eviction: Eviction,
        keys: Callable[[int, slice], Tensor],
        *,
        parts: int = 1,
    ) -> None:
        """Forget the tokens of a prompt, once it is complete, that its last queries do not look at. To be asked once in
        every call.

        Args:
            query, mask: of the call, (B, H, Q, D) and (B or 1, 1, Q, T) bool.
            scaling: the model's score scale.
            eviction: how many tokens are kept, and by which queries.
            keys: number of a sequence, positions of its prompt → rotated keys of these, (G, T, D).
            parts: how many groups of heads choose for themselves: heads that share their coefficients choose together.
        """
        completed = self.prompts.completed(query, self.get_seq_length(), eviction.window_size)
        if completed is None:
            return
        prompt, query_BHWD = completed
        for b, sequence in enumerate(self.sequences):
            present_T = None if mask is None else present(mask, b, prompt)
            score_PT = eviction.scores(query_BHWD[b], keys(b, prompt), scaling, present_T, parts=parts)
            sequence.evict(score_PT, prompt, eviction)

    def get_seq_length(self) -> int:
        return 0 if self._first is None else self._first.length

    def expect_prompt(self, length: int) -> None:
        start = self.get_seq_length()
        if length > start + 1:
            self.prompts.expect(start, length)
        else:  # a single token continues the text before it
            self.prompts.expect(0, 0)

    def activate_past_recording(self) -> None:
        """Until the next `generate()` the tokens of any call may be cropped right after it."""
        self.prompts.record_past = True

    def check_crop(self, length: int) -> None:
        super().check_crop(length)
        for sequence in self.sequences if length else []:  # an empty sequence lacks nothing
            check_croppable(length, sequence.min_crop_length)

    def truncate(self, length: int) -> None:
        old_length = self.get_seq_length()
        if not length:  # nor does a basis stay that has followed the text
            self.sequences = [self.new_sequence() for _ in self.sequences]
        for sequence in self.sequences:
            sequence.crop(length)
        self.prompts.crop(length, old_length)

    def select(self, rows: list[int]) -> None:
        # The first beam to follow a sequence takes its state over; only further ones cost a copy.
        taken: set[int] = set()
        selected = []
        for row in rows:
            selected.append(self.sequences[row].clone() if row in taken else self.sequences[row])
            taken.add(row)
        self.sequences = selected
        self.prompts.select(rows)

    def clear(self) -> None:
        self.sequences = []
        self.prompts.clear()

    def copy_state(self, memo: dict) -> None:
        self.sequences = [sequence.clone() for sequence in self.sequences]

    def __deepcopy__(self, memo: dict) -> "SequenceLayer":
        twin = super().__deepcopy__(memo)
        twin.prompts = copy.copy(self.prompts)  # a prompt may be declared before there is any other state
        return twin

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        for sequence in self.sequences:
            yield from sequence.tensors_by_kind()
        for tensor in self.prompts.tensors():
            yield BUFFERS, tensor


def present(mask: Tensor, b: int, positions: slice) -> Tensor:
    """False for padding: tokens of a sequence that no query of the call may see. A later call cannot bring them back."""
    return mask_of_sequence(mask, b)[:, positions].any(dim=0)


def new_present(mask: Tensor | None, b: int, new: slice, padding: Tensor) -> Tensor | None:
    """The same of the new tokens of a call, (Q,) bool; None where none of them is padding.

    Args:
        mask: of the call, (B or 1, 1, Q, T) bool; None where only causality masks.
        new: the positions of its tokens.
        padding: positions of earlier calls' padding, which is not stored, rising.

    Raises:
        UserError: the call would attend to such padding.
    """
    has_padding = padding.shape[0] > 0
    if mask is None:
        if has_padding:
            raise _is_lost(int(padding[0]), b, "is left out, or all ones, and so shows")
        return None
    row_QT = mask_of_sequence(mask, b)
    is_present_Q = row_QT[:, new].any(dim=0)
    is_plain = is_present_Q.all()
    if has_padding:
        is_plain &= ~row_QT[:, padding].any()
    if bool(is_plain):  # one look at the device for both, as it is taken for every decoded token
        return None
    is_shown_P = row_QT[:, padding].any(dim=0)
    if bool(is_shown_P.any()):
        raise _is_lost(int(padding[is_shown_P][0]), b, "shows")
    return is_present_Q


def _is_lost(position: int, b: int, shows: str) -> UserError:
    return UserError(
        f"`attention_mask` {shows} the token at position {position} of sequence {b}, which was hidden from every query of "
        f"the call that brought it: the cache took it for padding and did not store it; pass the mask of that call and, "
        f"behind it, ones for the tokens since, or read the text into a fresh cache by the mask that it is to have"
    )


def mask_of_sequence(mask: Tensor, b: int) -> Tensor:
    """One sequence's (Q, T) of a mask (B, 1, Q, T), or of a mask that all sequences share, (1, 1, Q, T)."""
    return mask[b if mask.shape[0] > 1 else 0, 0]
