"""A needle in a haystack: values to be remembered for keys, in noise, in an essay, or among other needles."""

import dataclasses
import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from .sample import MOST_UNITS, RulerTask, Sample
from .words import NUMBERS, UUIDS, WORDS, drawn

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
REPEATED, ESSAY, NEEDLES = "noise", "essay", "needles"
# Where needles may stand in an essay, in per cent of its sentences.
DEPTHS = [round(100 * i / 39) for i in range(40)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedleTask(RulerTask):
    """One of the eight.

    Attributes:
        haystack: what needles are hidden in.
        key, value: kinds of them.
        num_keys, num_values, num_queries: keys, values of each, and how many keys are asked for.
        essay: sentences, of which each sample begins at another one.
    """

    haystack: str
    key: str = WORDS
    value: str = NUMBERS
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1
    essay: tuple[str, ...] = ()
    max_new_tokens: int = 128

    @property
    def needs_essay(self) -> bool:
        return self.haystack == ESSAY

    def within(self, essay: Sequence[str]) -> "NeedleTask":
        """The same in an essay of these sentences."""
        return dataclasses.replace(self, essay=tuple(essay))

    def units(self, index: int, length: int) -> tuple[int, int]:
        return 1, MOST_UNITS  # a short essay is repeated

    def sample(
        self, rng: random.Random, index: int, units: int, length: int, tokenizer: PreTrainedTokenizerBase
    ) -> Sample:
        keys = [drawn(self.key, rng) for _ in range(self.num_keys)]
        values = [[drawn(self.value, rng) for _ in range(self.num_values)] for _ in keys]
        needles = [self._needle(key, value) for key, each in zip(keys, values, strict=True) for value in each]
        rng.shuffle(needles)
        asked = rng.sample(range(self.num_keys), self.num_queries)
        context = self._hide(needles, rng, units)
        query, one = joined([keys[i] for i in asked]), self.num_queries * self.num_values == 1
        kind = self.value.removesuffix("s") if one else self.value
        return Sample(
            context=f"{'A' if one else 'Some'} special magic {kind} {'is' if one else 'are'} hidden within the following "
            f"text. Make sure to memorize it. I will quiz you about the {kind} afterwards.\n{context}",
            question=f"\nWhat {'is' if one else 'are all'} the special magic {kind} for {query} mentioned in the provided "
            "text?",
            answer_prefix=f" The special magic {kind} for {query} mentioned in the provided text {'is' if one else 'are'}",
            references=[value for i in asked for value in values[i]],
            max_new_tokens=self.max_new_tokens,
        )

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value} for {key} is: {value}."

    def _hide(self, needles: list[str], rng: random.Random, units: int) -> str:
        if self.haystack == ESSAY:
            first = rng.randrange(len(self.essay))
            sentences = [self.essay[(first + i) % len(self.essay)] for i in range(units)]
            places = sorted(int(units * depth / 100) for depth in rng.sample(DEPTHS, len(needles)))
        else:
            # As shares of the haystack, so that needles stay where they are when it grows.
            places = sorted(int(units * share) for share in [rng.random() for _ in needles])
            filler = rng if self.haystack == NEEDLES else None
            sentences = [self._filler(filler) for _ in range(units)]
        for place, needle in zip(reversed(places), reversed(needles), strict=True):
            sentences.insert(place, needle)
        return (" " if self.haystack == ESSAY else "\n").join(sentences)

    def _filler(self, rng: random.Random | None) -> str:
        return NOISE if rng is None else self._needle(drawn(self.key, rng), drawn(self.value, rng))


def joined(names: list[str]) -> str:
    """a, b, and c"""
    return ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]


NEEDLE_TASKS = {
    "niah_single_1": NeedleTask(haystack=REPEATED),
    "niah_single_2": NeedleTask(haystack=ESSAY),
    "niah_single_3": NeedleTask(haystack=ESSAY, value=UUIDS),
    "niah_multikey_1": NeedleTask(haystack=ESSAY, num_keys=4),
    "niah_multikey_2": NeedleTask(haystack=NEEDLES),
    "niah_multikey_3": NeedleTask(haystack=NEEDLES, key=UUIDS, value=UUIDS),
    "niah_multivalue": NeedleTask(haystack=ESSAY, num_values=4),
    "niah_multiquery": NeedleTask(haystack=ESSAY, num_keys=4, num_queries=4),
}
