"""What every task of RULER's is: samples of any number of units."""

import abc
import dataclasses
import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ..continuation import encode_behind


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

    def num_tokens(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Of the prompt, and of the answer at most."""
        # Context and question become tokens apart, as they are read.
        behind = encode_behind(tokenizer, self.question + self.answer_prefix)
        return len(tokenizer(self.context).input_ids) + len(behind) + self.max_new_tokens


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
