"""Which words appear most often: among numbered words (`cwe`), and among coded words of falling frequency (`fwe`)."""

import dataclasses
import math
import random
import string

from transformers import PreTrainedTokenizerBase

from .sample import MOST_UNITS, RulerTask, Sample
from .words import different, enumerated

_NUM_COMMON = 10
_SHORT = 4096  # below, RULER repeats words less often


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonWords(RulerTask):
    """`cwe`: ten words stand more often in a list than the others; one example in front."""

    max_new_tokens: int = 120

    def units(self, index: int, length: int) -> tuple[int, int]:
        return _NUM_COMMON + 1, MOST_UNITS

    def sample(
        self, rng: random.Random, index: int, units: int, length: int, tokenizer: PreTrainedTokenizerBase
    ) -> Sample:
        shown, times = ((20, (3, 1)), (6, 1)) if length < _SHORT else ((40, (10, 3)), (30, 3))
        example = self._text(random.Random(rng.random()), shown[0], *shown[1])
        asked = self._text(rng, units, *times)
        answered = f"{example.context}{example.question}{example.answer_prefix} {enumerated(example.references)}"
        return dataclasses.replace(asked, context=f"{answered}\n{asked.context}")

    def _text(self, rng: random.Random, num_words: int, common_times: int, other_times: int) -> Sample:
        words = different(rng, num_words)
        common, others = words[:_NUM_COMMON], words[_NUM_COMMON:]
        numbered = common * common_times + others * other_times
        rng.shuffle(numbered)
        return Sample(
            context="Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
            f"ones that appear most often.\n{enumerated(numbered)}",
            question="\nQuestion: What are the 10 most common words in the above list?",
            answer_prefix=" Answer: The top 10 words that appear most often in the list are:",
            references=common,
            max_new_tokens=self.max_new_tokens,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrequentWords(RulerTask):
    """`fwe`: the k-th of n coded words stands ⌊units · k^−α / ζ(α)⌋ times; the first is printed as dots, the next
    three are the answer.

    Attributes:
        word_length: letters of a coded word.
    """

    word_length: int = 6
    max_new_tokens: int = 50
    alpha: float = 2.0

    def units(self, index: int, length: int) -> tuple[int, int]:
        # So that the fourth word stands at least twice, and more often than the fifth.
        return 60, MOST_UNITS

    def sample(
        self, rng: random.Random, index: int, units: int, length: int, tokenizer: PreTrainedTokenizerBase
    ) -> Sample:
        vocabulary: list[str] = []
        while len(vocabulary) < max((length - self.max_new_tokens) // 50, 5):
            word = "".join(rng.choices(string.ascii_lowercase, k=self.word_length))
            vocabulary += [word] * (word not in vocabulary)
        vocabulary[0] = "..."
        coded = [word for k, word in enumerate(vocabulary, 1) for _ in range(self.times(k, units))]
        rng.shuffle(coded)
        return Sample(
            context="Read the following coded text and track the frequency of each coded word. Find the three most "
            f"frequently appeared coded words. {' '.join(coded)}",
            question="\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
            "frequently appeared words in the above coded text?",
            answer_prefix=" Answer: According to the coded text above, the three most frequently appeared words are:",
            references=vocabulary[1:4],
            max_new_tokens=self.max_new_tokens,
        )

    def times(self, k: int, units: int) -> int:
        """How often the k-th word stands."""
        return int(units * k**-self.alpha / _zeta(self.alpha))


def _zeta(alpha: float) -> float:
    """Riemann's ζ, by Euler and Maclaurin; exact in fp64 for α ≥ 1.5."""
    terms = 50
    head = math.fsum(k**-alpha for k in range(1, terms))
    tail = terms ** (1 - alpha) / (alpha - 1) + terms**-alpha / 2
    return (
        head
        + tail
        + alpha * terms ** (-alpha - 1) / 12
        - alpha * (alpha + 1) * (alpha + 2) * terms ** (-alpha - 3) / 720
    )
