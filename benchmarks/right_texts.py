"""What a right text is where coefficients are rounded to codes: a reference, how far it parts from itself, and a rule.

A coefficient at the border of two codes takes the other one when a sum is added in another order: in a chunk of a prompt, in
a batch, behind a prefix that another request left. So correct runs differ in logits, and part where two tokens are nearly
as likely. How nearly is measured on the reference itself, which reads each prompt at once and in pieces: its spread is the
most that a token it says behind one reading lacks of the likeliest one behind another. A served token is right if the
reference, behind the same tokens, gives it a logit at most twice the largest spread below the best, for the server reads in
more ways than the few that were tried. What a token lacks is looked at, and not how far logits move: they move most where
one token is far ahead, and no text parts there.

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

PIECES = (
    96,
    17,
)  # tokens of a prompt that the reference reads at a time, beside all of them and numbers drawn at random
SWAPPED = 5  # the rank of the token that a control has in place of the likeliest one
PAGE = 128  # tokens that the wrong page of a control has
MARGIN = 2  # times the spread that a right token may lack
ROUNDING = 1e-3  # a spread is at least as large: logits that differ by less may change places though no code does


@dataclasses.dataclass
class Expected:
    """What a prompt is to be answered.

    Attributes:
        prompt, answer: token ids, the answer the reference's.
        spread: of the reference at this answer, in logits.
        lead_change: how far its logits move, which the rule does not ask for.
        read: the prompt, read at once.
    """

    prompt: list[int]
    answer: list[int]
    spread: float
    lead_change: float
    read: Reader

    def agreed(self, found: Sequence[int]) -> int:
        """Tokens of a text up to where it parts from the answer."""
        return len(os.path.commonprefix([list(found), self.answer]))

    def gap(self, found: Sequence[int]) -> float:
        """What a text's tokens lack of the likeliest ones behind the same tokens, at most, in logits; 0 where the text is
        the answer as far as it goes."""
        if self.agreed(found) == len(found):
            return 0.0
        return float(gaps(forced(self.read, found), found).max())


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
        runs = [forced(other, answer) for other in others]
        changes = [max(measure(logits_TV, run_TV) for run_TV in runs) for measure in (spread, lead_change)]
        return Expected(prompt, answer, *changes, read)

    def answer(self, prompt: list[int], tokens: int) -> list[int]:
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


def greedy(read: Reader, tokens: int) -> tuple[list[int], Tensor]:
    """The likeliest tokens behind what was read, one after another, and the logits of each, (T, V)."""
    reader, answer, logits = read.copy(), [], []
    for _ in range(tokens):
        logits.append(reader.logits_V)
        answer.append(int(reader.logits_V.argmax()))
        if len(answer) < tokens:
            reader.read(answer[-1:])
    return answer, torch.stack(logits)


def forced(read: Reader, tokens: Sequence[int]) -> Tensor:
    """The logits of each token of a text behind what was read and the tokens before it, (T, V)."""
    first_1V = read.logits_V[None]
    return torch.cat([first_1V, read.copy().read(tokens[:-1])]) if len(tokens) > 1 else first_1V


def spread(one_TV: Tensor, other_TV: Tensor) -> float:
    """The most that the likeliest tokens of one run's logits lack in the other's, either way."""
    pairs = (one_TV, other_TV), (other_TV, one_TV)
    return max(float(gaps(logits_TV, said_TV.argmax(1).tolist()).max()) for logits_TV, said_TV in pairs)


def lead_change(one_TV: Tensor, other_TV: Tensor) -> float:
    """How much the lead of one run's likeliest token over its second changes in another run, at most."""
    best_T2 = one_TV.topk(2).indices
    one_T, other_T = (logits_TV.gather(1, best_T2).diff()[:, 0] for logits_TV in (one_TV, other_TV))
    return float((other_T - one_T).abs().max())


def gaps(logits_TV: Tensor, tokens: Sequence[int]) -> Tensor:
    """What each token of a text lacks of the likeliest one, in logits, (T,)."""
    token_T1 = torch.tensor(list(tokens), device=logits_TV.device)[:, None]
    return logits_TV.amax(1) - logits_TV.gather(1, token_T1)[:, 0]


def most_lacking(expected: Iterable[Expected]) -> float:
    """What a token of a right text may lack."""
    return MARGIN * max(ROUNDING, *(each.spread for each in expected))


def longest(texts: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Texts that no other one begins with, each once: a text is right where a longer one is."""
    ordered = sorted(set(texts))
    return [
        text for text, following in zip_longest(ordered, ordered[1:], fillvalue=()) if following[: len(text)] != text
    ]


def controls(reference: Reference, expected: Sequence[Expected], seed: int) -> dict[str, list[tuple[int, list[int]]]]:
    """Texts that are wrong by construction, by what is wrong with them: the number of the prompt, and the text.

    - `foreign`: the answer to another prompt.
    - `swapped`: the answer up to a place where the fifth likeliest token stands.
    - `wrong_page`: the answer to the prompt with a page of another prompt in it.

    A text that happens to be the answer is not wrong, and left out.
    """
    chance = random.Random(seed)
    found: dict[str, list[tuple[int, list[int]]]] = {"foreign": [], "swapped": [], "wrong_page": []}
    for number, each in enumerate(expected):
        # Half of them away, because neighbours begin alike.
        other, tokens = expected[(number + len(expected) // 2) % len(expected)], len(each.answer)
        found["foreign"].append((number, other.answer))
        place = chance.randrange(tokens)
        last_V = forced(each.read, each.answer[: place + 1])[-1]
        found["swapped"].append((number, [*each.answer[:place], int(last_V.topk(SWAPPED).indices[-1])]))
        if pages := min(len(each.prompt), len(other.prompt)) // PAGE:
            start = PAGE * chance.randrange(pages)
            mixed = [*each.prompt[:start], *other.prompt[start : start + PAGE], *each.prompt[start + PAGE :]]
            found["wrong_page"].append((number, reference.answer(mixed, tokens)))
    return {
        kind: [(number, text) for number, text in texts if expected[number].agreed(text) < len(text)]
        for kind, texts in found.items()
    }
