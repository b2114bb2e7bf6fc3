"""How an answer is compared with its references."""

import abc
import re
from collections.abc import Sequence
from typing import Any


class Metric(abc.ABC):
    """Scores a generated text between 0 and 1."""

    name: str
    """As results call it."""

    @abc.abstractmethod
    def score(self, text: str, references: Sequence[str]) -> float:
        """The score of an answer."""

    def is_settled(self, text: str, references: Sequence[str]) -> bool:
        """Whether no continuation can change the score, so that generation may stop."""
        return False

    def content(self) -> Any:
        """All that distinguishes it, as JSON."""
        return self.name


class AllContained(Metric):
    """Share of the references that the text contains, whatever their case (RULER's `string_match_all`)."""

    name = "share of references found"

    def score(self, text: str, references: Sequence[str]) -> float:
        return sum(reference.lower() in text.lower() for reference in references) / len(references)

    def is_settled(self, text: str, references: Sequence[str]) -> bool:
        return self.score(text, references) == 1


class AnyContained(Metric):
    """1 where the text contains one of the references, whatever its case (RULER's `string_match_part`)."""

    name = "a reference found"

    def score(self, text: str, references: Sequence[str]) -> float:
        return float(any(reference.lower() in text.lower() for reference in references))

    def is_settled(self, text: str, references: Sequence[str]) -> bool:
        return self.score(text, references) == 1


class BeginsWith(Metric):
    """1 where the text begins with the reference."""

    name = "right"

    def score(self, text: str, references: Sequence[str]) -> float:
        return float(any(text.startswith(reference) for reference in references))

    def is_settled(self, text: str, references: Sequence[str]) -> bool:
        return all(len(text) >= len(each) or not each.startswith(text) for each in references)


_THOUSANDS = r"(?:,\\!|,|\\[,!;]|\s)"  # as LaTeX writes their separator
_MOST_DIGITS = 4000  # Python reads hardly longer ones


class BoxedInteger(Metric):
    r"""1 where the last ``\boxed{…}`` holds the reference's integer, as AIME's answers are given."""

    name = "exact match"

    def score(self, text: str, references: Sequence[str]) -> float:
        found = boxed_integer(text)
        return float(found is not None and any(found == int(reference) for reference in references))


def boxed_integer(text: str) -> int | None:
    r"""The integer in the last ``\boxed{…}``: braces, dollars and text around it do not count, and a comma or a space
    separates thousands only where three digits follow. ``1,234`` is an integer; ``1,2`` and ``1, 234`` are several."""
    found = re.findall(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}", text)
    if not found:
        return None
    written = re.sub(r"\\text\s*\{[^{}]*\}|[${}]", "", found[-1]).strip()
    if not re.fullmatch(rf"[+-]?\s*(?:\d+|[1-9]\d{{0,2}}(?:{_THOUSANDS}\d{{3}})+)", written):
        return None
    digits = re.sub(rf"{_THOUSANDS}|\s", "", written)
    return int(digits) if len(digits) <= _MOST_DIGITS else None
