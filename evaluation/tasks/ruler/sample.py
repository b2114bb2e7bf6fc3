"""What every task of RULER's is: samples of any number of units."""

import abc
import dataclasses
import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..item import prompt_pieces

MOST_UNITS = 1 << 20  # of a task that has no limit of its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt and its answers.

    Attributes:
        context: the instruction and the haystack.
        question: what follows it.
        answer_prefix: what the answer begins with.
        references: all of which, or one of which, is to be found.
        max_new_tokens: of the answer.
    """

    context: str
    question: str
    answer_prefix: str
    references: Sequence[str]
    max_new_tokens: int

    def pieces(
        self, tokenizer: PreTrainedTokenizerBase, *, chat: bool = False
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids of the context and of the question; see :func:`evaluation.tasks.item.prompt_pieces`."""
        return prompt_pieces(tokenizer, self.context, self.question, self.answer_prefix, chat=chat)

    def num_tokens(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool = False) -> int:
        """Of the prompt, a chat template's own included, and of the answer at most."""
        return sum(map(len, self.pieces(tokenizer, chat=chat))) + self.max_new_tokens


class RulerTask(abc.ABC):
    """One of the thirteen.

    Attributes:
        max_new_tokens: of an answer.
    """

    max_new_tokens: int

    @abc.abstractmethod
    def sample(
        self, rng: random.Random, index: int, units: int, length: int, tokenizer: PreTrainedTokenizerBase
    ) -> Sample:
        """The sample of that index with `units` units of haystack, whatever their number about the same thing.

        Args:
            rng: of the sample; it decides everything else.
            length: tokens that the sample is for.
        """

    @abc.abstractmethod
    def units(self, index: int, length: int) -> tuple[int, int]:
        """The least and the most units of the sample of that index."""

    def num_indices(self, count: int) -> int:
        """How many samples may be tried to find `count` that fit."""
        return count

    def cluster(self, index: int) -> int:
        """What the sample of that index is about: those of one number are about the same text."""
        return index
