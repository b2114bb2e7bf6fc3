"""Words, numbers and identifiers to hide, as RULER draws them: words from the package `wonderwords`."""

import functools
import importlib
import random
import uuid
from collections.abc import Sequence

from lowrank_kv.utils.errors import not_installed

WORDS, NUMBERS, UUIDS = "words", "numbers", "uuids"
_DIGITS = 7


@functools.cache
def listed(*parts: str) -> tuple[str, ...]:
    """Different words of these parts of speech, among NOUNS, ADJECTIVES and VERBS, in alphabetical order.

    Raises:
        UserError: `wonderwords` is not installed.
    """
    try:
        wonderwords = importlib.import_module("wonderwords")
    except ImportError as error:
        raise not_installed("this task of RULER, which draws words,", "wonderwords", extra="eval") from error
    lists = [wonderwords.RandomWord(words=getattr(wonderwords.Defaults, part)).filter() for part in parts]
    return tuple(sorted({word for words in lists for word in words}))


def drawn(kind: str, rng: random.Random) -> str:
    """One word (adjective-noun), number of seven digits, or uuid of version 4."""
    if kind == NUMBERS:
        return str(rng.randrange(10 ** (_DIGITS - 1), 10**_DIGITS))
    if kind == UUIDS:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(listed('ADJECTIVES'))}-{rng.choice(listed('NOUNS'))}"


def different(rng: random.Random, count: int) -> list[str]:
    """As many different words in an order that does not depend on `count`: all of a list, then pairs of an adjective and
    a noun."""
    words = listed("NOUNS", "ADJECTIVES", "VERBS")
    found = dict.fromkeys(rng.sample(words, len(words)))
    while len(found) < count:
        found[drawn(WORDS, rng)] = None
    return list(found)[:count]


def enumerated(words: Sequence[str]) -> str:
    """1. this 2. that"""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
