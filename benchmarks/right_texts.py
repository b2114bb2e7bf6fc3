"""What a right text is where coefficients are rounded to codes: a reference, how far it parts from itself, and a rule.

A coefficient at the border of two codes takes the other one when a sum is added in another order: in a chunk of a prompt, in
a batch, behind a prefix that another request left. So correct runs differ in logits, and part where two tokens are nearly
as likely. How far is measured on the reference itself, which reads each prompt at once and in pieces. Two things are looked
at, and a right text may be twice as far from the reference as the reference's own readings are from each other, for a server
reads in more ways than the few that were tried:

- its gap: the most that a token lacks, behind the same tokens, of the likeliest one, in logits;
- its drift: how far the log-probabilities that were told of its tokens are from the reference's, as a mean over the text. A
  wrong page often changes no token, but it moves the numbers of all.

Shapes: T tokens of an answer, V vocabulary.
"""

import dataclasses
import os
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from evaluation.tasks.reader import Reader

# Tokens of a prompt that the reference reads at a time, beside all of them and numbers drawn at random.
PIECES = (96, 17)
SWAPPED = 5  # the rank of the token that a control has in place of the likeliest one
PAGE = 128  # tokens that the wrong page of a control has
MARGIN = 2  # times what the reference's readings differ by: what right texts may
ROUNDING = 1e-3  # they differ by at least so much, of which sums in fp32 may be off though no code changes
FEWEST = 8  # tokens that a drift is the mean over


@dataclasses.dataclass(frozen=True)
class Text:
    """What was said.

    Attributes:
        tokens: their ids.
        logprobs: the log-probability that was told of each, in nats.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far a text, or a reading, is from the reference: gap and drift."""

    gap: float
    drift: float

    def exceeds(self, limit: "Distance") -> bool:
        return self.gap > limit.gap or self.drift > limit.drift


@dataclasses.dataclass
class Expected:
    """What a prompt is to be answered.

    Attributes:
        prompt: token ids.
        answer: the reference's.
        spread: of the reference's readings at this answer, at most.
        read: the prompt, read at once.
    """

    prompt: list[int]
    answer: Text
    spread: Distance
    read: Reader

    def agreed(self, tokens: Sequence[int]) -> int:
        """Tokens of a text up to where it parts from the answer."""
        return len(os.path.commonprefix([tuple(tokens), self.answer.tokens]))

    def distances(self, texts: Iterable[Text]) -> list[Distance]:
        """How far each text is."""
        texts = list(texts)
        known = [(self.answer.tokens, torch.zeros(len(self.answer.tokens)), torch.tensor(self.answer.logprobs))]
        for tokens in longest(text.tokens for text in texts):
            if self.agreed(tokens) < len(tokens):
                logits_TV = forced(self.read, tokens)
                known.append((tokens, gaps(logits_TV, tokens), logprobs_of(logits_TV, tokens)))
        return [self._distance(text, known) for text in texts]

    @staticmethod
    def _distance(text: Text, known: list[tuple[tuple[int, ...], Tensor, Tensor]]) -> Distance:
        count = len(text.tokens)
        _, gap_T, logprob_T = next(each for each in known if each[0][:count] == text.tokens)
        return Distance(
            gap=float(gap_T[:count].max()) if count else 0.0,
            drift=drift(torch.tensor(text.logprobs), logprob_T[:count]),
        )


class Reference:
    """Answers prompts by a model and its caches, and measures how far the answers depend on how a prompt is read.

    Args:
        new_cache: makes a fresh cache.
        seed: of the pieces that are drawn at random.
    """

    def __init__(self, model: PreTrainedModel, new_cache: Callable[[], Cache], *, seed: int = 0):
        self._model, self._new_cache, self._chance = model, new_cache, random.Random(seed)

    def expected(self, prompt: list[int], tokens: int) -> Expected:
        """The answer to a prompt, its spread, and the prompt as it was read."""
        read = self._read(prompt, [len(prompt)])
        answer, logits_TV = greedy(read, tokens)
        others = [read, *(self._read(prompt, sizes) for sizes in self._divisions(len(prompt)))]
        runs = [forced(other, answer.tokens) for other in others]
        logprob_T = torch.tensor(answer.logprobs)
        spread = Distance(
            gap=max(spread_of(logits_TV, run_TV) for run_TV in runs),
            drift=max(drift(logprob_T, logprobs_of(run_TV, answer.tokens)) for run_TV in runs),
        )
        return Expected(prompt, answer, spread, read)

    def answer(self, prompt: list[int], tokens: int) -> Text:
        """The answer alone."""
        return greedy(self._read(prompt, [len(prompt)]), tokens)[0]

    def _divisions(self, length: int) -> list[list[int]]:
        """Lengths of pieces that a prompt is read in."""
        at_random = [self._chance.randint(1, PAGE) for _ in range(length)]
        return [*([size] * length for size in PIECES if size < length), at_random]

    def _read(self, prompt: list[int], sizes: Iterable[int]) -> Reader:
        reader = Reader(self._model, self._new_cache())
        for size in sizes:
            if piece := prompt[reader.num_read : reader.num_read + size]:
                reader.read_prompt(piece)
        return reader


def greedy(read: Reader, tokens: int) -> tuple[Text, Tensor]:
    """The likeliest tokens behind what was read, one after another, and the logits at each, (T, V)."""
    reader, answer, logits = read.copy(), [], []
    for _ in range(tokens):
        logits.append(reader.logits_V)
        answer.append(int(reader.logits_V.argmax()))
        if len(answer) < tokens:
            reader.read(answer[-1:])
    logits_TV = torch.stack(logits)
    return Text(tuple(answer), tuple(logprobs_of(logits_TV, answer).tolist())), logits_TV


def forced(read: Reader, tokens: Sequence[int]) -> Tensor:
    """The logits of each token of a text behind what was read and the tokens before it, (T, V)."""
    first_1V = read.logits_V[None]
    return torch.cat([first_1V, read.copy().read(list(tokens[:-1]))]) if len(tokens) > 1 else first_1V


def spread_of(one_TV: Tensor, other_TV: Tensor) -> float:
    """The most that the likeliest tokens of one run's logits lack in the other's, either way."""
    pairs = (one_TV, other_TV), (other_TV, one_TV)
    return max(float(gaps(logits_TV, said_TV.argmax(1).tolist()).max()) for logits_TV, said_TV in pairs)


def drift(one_T: Tensor, other_T: Tensor) -> float:
    """The mean distance of a text's log-probabilities, over as many first tokens as make it the largest, but `FEWEST`; 0 of
    a text of fewer."""
    count_T = torch.arange(1, len(one_T) + 1)
    mean_T = (one_T - other_T).abs().cumsum(0) / count_T
    return float(mean_T[FEWEST - 1 :].max()) if len(mean_T) >= FEWEST else 0.0


def logprobs_of(logits_TV: Tensor, tokens: Sequence[int]) -> Tensor:
    """The log-probability of each token of a text, (T,)."""
    token_T1 = torch.tensor(list(tokens), device=logits_TV.device)[:, None]
    return logits_TV.float().log_softmax(1).gather(1, token_T1)[:, 0]


def gaps(logits_TV: Tensor, tokens: Sequence[int]) -> Tensor:
    """What each token of a text lacks of the likeliest one, in logits, (T,)."""
    token_T1 = torch.tensor(list(tokens), device=logits_TV.device)[:, None]
    return logits_TV.amax(1) - logits_TV.gather(1, token_T1)[:, 0]


def furthest(expected: Iterable[Expected]) -> Distance:
    """How far a right text may be."""
    spreads = [each.spread for each in expected]
    return Distance(
        gap=MARGIN * max(ROUNDING, *(spread.gap for spread in spreads)),
        drift=MARGIN * max(ROUNDING, *(spread.drift for spread in spreads)),
    )


def longest(texts: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Texts that no other one begins with, each once: a text is right where a longer one is."""
    ordered = sorted(set(texts))
    return [
        text for text, following in zip_longest(ordered, ordered[1:], fillvalue=()) if following[: len(text)] != text
    ]


def controls(reference: Reference, expected: Sequence[Expected], seed: int) -> dict[str, list[tuple[int, Text]]]:
    """Texts that are wrong by construction, by what is wrong with them: the number of the prompt, and the text.

    - `foreign`: the answer to another prompt.
    - `swapped`: the answer up to a place where the fifth likeliest token stands.
    - `wrong_page`: the answer to the prompt with a page of another prompt in it.
    """
    chance = random.Random(seed)
    found: dict[str, list[tuple[int, Text]]] = {"foreign": [], "swapped": [], "wrong_page": []}
    for number, each in enumerate(expected):
        # Half of them away, because neighbours begin alike.
        other, tokens = expected[(number + len(expected) // 2) % len(expected)], len(each.answer.tokens)
        found["foreign"].append((number, other.answer))
        found["swapped"].append((number, _swapped(each, chance.randrange(tokens))))
        if pages := min(len(each.prompt), len(other.prompt)) // PAGE:
            start = PAGE * chance.randrange(pages)
            mixed = [*each.prompt[:start], *other.prompt[start : start + PAGE], *each.prompt[start + PAGE :]]
            if mixed != each.prompt:
                found["wrong_page"].append((number, reference.answer(mixed, tokens)))
    return found


def _swapped(expected: Expected, place: int) -> Text:
    logits_V = forced(expected.read, expected.answer.tokens[: place + 1])[-1]
    token = int(logits_V.topk(SWAPPED).indices[-1])
    logprob = float(logprobs_of(logits_V[None], [token]))
    return Text((*expected.answer.tokens[:place], token), (*expected.answer.logprobs[:place], logprob))
