"""What a right text is where coefficients are rounded to codes: several references for each prompt, and a rule.

A coefficient at the border of two codes takes the other one when a sum is added in another order: in a chunk of a prompt, in
a batch, behind a prefix that another request left. So correct runs differ in logits, and part where two tokens are nearly
as likely. How far depends on the prompt. So the reference reads each prompt several times, at once and in different pieces,
and a text is held against the reading that is nearest to it. Pieces alone are not enough: a library often adds a token's
sums in one order however many tokens it is given, and another program adds them in another. So all readings but the first
are given embeddings with noise of the size of rounding. Two things are looked at:

- its gap: the most that a token lacks, behind the same tokens, of the reading's likeliest one, in logits;
- its drift: how far the log-probabilities that were told of its tokens are from the reading's, as a mean over the text. A
  wrong page often changes no token, but it moves the numbers of all.

Each reading's own answer is held against the others in the same way. The furthest of them is the prompt's spread, and a
right text may be twice as far, for a server reads in more ways than the few that were tried. Readings may give one answer by
chance: a gap's spread is at least what leads of the likeliest token over the next change by from one reading to another, but
for the tenth of them that change most, and no prompt is allowed less than the one in the middle.

Shapes: T tokens of an answer, V vocabulary.
"""

import contextlib
import dataclasses
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from evaluation.tasks.reader import Reader

# How often the reference reads each prompt, and how many tokens at a time, beside all of them; it draws the other divisions.
READINGS, PIECES = 6, (96, 17)
# Of an embedding, relative to each number: before the first code changes, the log-probabilities of two readings differ by
# some 1e-6 with it. Those of vLLM and transformers in fp32 differ by more.
NOISE = 3e-6
SWAPPED = 5  # the rank of the token that a control has in place of the likeliest one
DECIDED = 1.0  # logits that it lacks at least: with fewer it may be as right
PAGE = 128  # tokens that the wrong page of a control has
SETTLED = 0.9  # of all changes of leads, these are a gap's spread at least
MARGIN = 2  # times how far a reading's own answer is from the others: what right texts may be
ROUNDING = 1e-3  # it is at least so much, of which sums in fp32 may be off though no code changes
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
    """How far a text is from a reading: gap and drift."""

    gap: float
    drift: float

    def exceeds(self, limit: "Distance") -> bool:
        return self.gap > limit.gap or self.drift > limit.drift

    def nearer(self, other: "Distance") -> "Distance":
        """The smaller gap and the smaller drift."""
        return Distance(min(self.gap, other.gap), min(self.drift, other.drift))


@dataclasses.dataclass
class Reading:
    """A prompt as it was read once.

    Attributes:
        read: the prompt.
        answer: what follows, decoded token by token, as a server decodes it.
    """

    read: Reader
    answer: Text

    def distances(self, texts: Iterable[Text]) -> list[Distance]:
        """How far each text is from this reading."""
        texts = list(texts)
        own = self.answer
        known = [(own.tokens, torch.zeros(len(own.tokens)), torch.tensor(own.logprobs))]
        for tokens in longest(text.tokens for text in texts):
            if own.tokens[: len(tokens)] != tokens:
                logits_TV = forced(self.read, tokens)
                known.append((tokens, gaps(logits_TV, tokens), logprobs_of(logits_TV, tokens)))
        return [_distance(text, known) for text in texts]


@dataclasses.dataclass
class Expected:
    """What a prompt is to be answered.

    Attributes:
        prompt: token ids.
        readings: the prompt, read at once and in pieces.
        spread: how far readings' own answers are from the nearest other reading, at most, and what leads change by.
    """

    prompt: list[int]
    readings: list[Reading]
    spread: Distance

    @property
    def answer(self) -> Text:
        """Of the prompt that was read at once."""
        return self.readings[0].answer

    def agreed(self, tokens: Sequence[int]) -> int:
        """Tokens of a text up to where it parts from the answer."""
        return len(os.path.commonprefix([tuple(tokens), self.answer.tokens]))

    def distances(self, texts: Iterable[Text], limit: Distance) -> list[Distance]:
        """How far each text is from the nearest reading, or from the nearest of the first ones that are within a limit."""
        texts = list(texts)
        found = {text: Distance(float("inf"), float("inf")) for text in texts}
        for reading in self.readings:
            # Only those that are not near enough yet: each takes a pass through the model.
            left = [text for text in found if found[text].exceeds(limit)]
            for text, distance in zip(left, reading.distances(left), strict=True):
                found[text] = found[text].nearer(distance)
        return [found[text] for text in texts]


class Reference:
    """Answers prompts by a model and its caches, and measures how far the answers depend on how a prompt is read.

    Args:
        new_cache: makes a fresh cache.
        seed: of the pieces and of the noise that are drawn at random.
    """

    def __init__(self, model: PreTrainedModel, new_cache: Callable[[], Cache], *, seed: int = 0):
        self._model, self._new_cache, self._chance = model, new_cache, random.Random(seed)
        self._generator = torch.Generator(model.device).manual_seed(seed)

    def expected(self, prompt: list[int], tokens: int) -> Expected:
        """The answer to a prompt, its spread, and the prompt as it was read."""
        at_once, *others = self._divisions(len(prompt))
        readings = [self._reading(prompt, at_once, tokens)]
        readings += [self._reading(prompt, sizes, tokens, noise=NOISE) for sizes in others]
        nearest = {number: Distance(float("inf"), float("inf")) for number in range(len(readings))}
        for number, reading in enumerate(readings):
            others = [i for i in nearest if i != number]
            for i, distance in zip(others, reading.distances(readings[i].answer for i in others), strict=True):
                nearest[i] = nearest[i].nearer(distance)
        runs = [forced(reading.read, readings[0].answer.tokens) for reading in readings]
        spread = Distance(
            gap=max(lead_change(runs), *(each.gap for each in nearest.values())),
            drift=max(each.drift for each in nearest.values()),
        )
        return Expected(prompt, readings, spread)

    def answer(self, prompt: list[int], tokens: int) -> Text:
        """The answer alone."""
        return self._reading(prompt, [len(prompt)], tokens).answer

    def _divisions(self, length: int) -> list[tuple[int, ...]]:
        """Lengths of the pieces that each reading reads a prompt in."""

        def drawn() -> tuple[int, ...]:
            return _division([self._chance.randint(1, min(PAGE, length)) for _ in range(length)], length)

        found = dict.fromkeys(_division([size] * length, length) for size in (length, *PIECES) if size <= length)
        distinct = min(READINGS, 2 ** (length - 1))  # a prompt of three tokens has four divisions
        while len(found) < distinct:
            found[drawn()] = None
        return [*found, *(drawn() for _ in range(READINGS - distinct))]

    def _reading(self, prompt: list[int], sizes: Iterable[int], tokens: int, noise: float = 0.0) -> Reading:
        read = Reader(self._model, self._new_cache())
        with self._noise(noise):
            for size in sizes:
                if piece := prompt[read.num_read : read.num_read + size]:
                    read.read_prompt(piece)
        return Reading(read, greedy(read, tokens))

    @contextlib.contextmanager
    def _noise(self, size: float) -> Iterator[None]:
        """Embeddings are off by so much, relative to each number."""

        def rounded(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            noise = torch.randn(output.shape, generator=self._generator, device=output.device)
            return output * (1 + size * noise).to(output.dtype)

        handle = self._model.get_input_embeddings().register_forward_hook(rounded) if size else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()


def _division(sizes: Iterable[int], length: int) -> tuple[int, ...]:
    """The first of these lengths that add up to `length`, the last of them cut short."""
    found: list[int] = []
    for size in sizes:
        if length:
            found.append(min(size, length))
            length -= found[-1]
    return tuple(found)


def _distance(text: Text, known: Sequence[tuple[tuple[int, ...], Tensor, Tensor]]) -> Distance:
    count = len(text.tokens)
    if not count:
        return Distance(0.0, 0.0)
    _, gap_T, logprob_T = next(each for each in known if each[0][:count] == text.tokens)
    return Distance(float(gap_T[:count].max()), drift(torch.tensor(text.logprobs), logprob_T[:count]))


def greedy(read: Reader, tokens: int) -> Text:
    """The likeliest tokens behind what was read, one after another."""
    reader, answer, logprobs = read.copy(), [], []
    for _ in range(tokens):
        logits_1V = reader.logits_V[None]
        answer.append(int(logits_1V.argmax()))
        logprobs.append(float(logprobs_of(logits_1V, answer[-1:])))
        if len(answer) < tokens:
            reader.read(answer[-1:])
    return Text(tuple(answer), tuple(logprobs))


def forced(read: Reader, tokens: Sequence[int]) -> Tensor:
    """The logits of each token of a text behind what was read and the tokens before it, (T, V)."""
    first_1V = read.logits_V[None]
    return torch.cat([first_1V, read.copy().read(list(tokens[:-1]))]) if len(tokens) > 1 else first_1V


def lead_change(runs: Sequence[Tensor]) -> float:
    """What the first run's leads of the likeliest token over the next differ by in other runs of one text, each (T, V), in
    all but the largest of the cases."""
    index_T2 = runs[0].topk(2, dim=1).indices
    leads = [-run_TV.gather(1, index_T2).diff(dim=1)[:, 0] for run_TV in runs]
    return float((torch.stack(leads[1:]) - leads[0]).abs().float().quantile(SETTLED))


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


def limits(expected: Sequence[Expected]) -> list[Distance]:
    """How far a right text may be, for each prompt."""
    spreads = [each.spread for each in expected]
    middle = Distance(*(statistics.median(values) for values in zip(*map(dataclasses.astuple, spreads), strict=True)))
    return [
        Distance(MARGIN * max(ROUNDING, middle.gap, each.gap), MARGIN * max(ROUNDING, middle.drift, each.drift))
        for each in spreads
    ]


def longest(texts: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Texts that no other one begins with, each once: a text is right where a longer one is."""
    ordered = sorted(set(texts))
    return [
        text for text, following in zip_longest(ordered, ordered[1:], fillvalue=()) if following[: len(text)] != text
    ]


def controls(reference: Reference, expected: Sequence[Expected], seed: int) -> dict[str, list[tuple[int, Text]]]:
    """Texts that are wrong by construction, by what is wrong with them: the number of the prompt, and the text.

    - `foreign`: the answer to another prompt.
    - `swapped`: the answer up to a place where the fifth likeliest token stands, which lacks :data:`DECIDED` logits, or the
      most where it lacks so much nowhere.
    - `wrong_page`: the answer to the prompt with a page of another prompt in it.
    """
    chance = random.Random(seed)
    found: dict[str, list[tuple[int, Text]]] = {"foreign": [], "swapped": [], "wrong_page": []}
    for number, each in enumerate(expected):
        # Half of them away, because neighbours begin alike.
        other = expected[(number + len(expected) // 2) % len(expected)]
        found["foreign"].append((number, other.answer))
        found["swapped"].append((number, _swapped(each, chance)))
        if pages := min(len(each.prompt), len(other.prompt)) // PAGE:
            start = PAGE * chance.randrange(pages)
            mixed = [*each.prompt[:start], *other.prompt[start : start + PAGE], *each.prompt[start + PAGE :]]
            if mixed != each.prompt:
                found["wrong_page"].append((number, reference.answer(mixed, len(each.answer.tokens))))
    return found


def _swapped(expected: Expected, chance: random.Random) -> Text:
    answer = expected.answer
    logits_TV = forced(expected.readings[0].read, answer.tokens)
    value_TK, index_TK = logits_TV.topk(SWAPPED, dim=1)
    lack_T = value_TK[:, 0] - value_TK[:, -1]
    place = chance.choice((lack_T >= DECIDED).nonzero()[:, 0].tolist() or [int(lack_T.argmax())])
    token = int(index_TK[place, -1])
    logprob = float(logprobs_of(logits_TV[place : place + 1], [token]))
    return Text((*answer.tokens[:place], token), (*answer.logprobs[:place], logprob))
