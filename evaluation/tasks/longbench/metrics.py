"""LongBench's metrics: each compares an answer with one reference, and the best reference counts.

They score as the benchmark's own do, but for one fault: of classes that are parts of the right one's name all are
left out, where the original misses every second of two that follow one another.
"""

import collections
import difflib
import importlib
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from lowrank_kv.utils.errors import not_installed

from ..matching import Metric
from .rouge import rouge_l

F1, F1_ZH, ROUGE, ROUGE_ZH = "F1", "F1 of Chinese words", "ROUGE-L", "ROUGE-L of Chinese words"
CLASSES, COUNT, CODE = "class", "count", "edit similarity"
RETRIEVAL, RETRIEVAL_ZH = "paragraph", "Chinese paragraph"

# What a reference of these names, and an answer is asked for.
_PARAGRAPHS = {RETRIEVAL: re.compile(r"Paragraph (\d+)"), RETRIEVAL_ZH: re.compile(r"段落(\d+)")}

_CHINESE_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』"
    "【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


class LongBenchMetric(Metric):
    """The best of the references' scores.

    Args:
        name: one of :data:`SCORES`.
        first_line: whether only the first line that is not empty counts.
        classes: of a classification.
    """

    def __init__(self, name: str, first_line: bool = False, classes: tuple[str, ...] = ()):
        self.name, self.first_line, self.classes = name, first_line, classes

    def score(self, text: str, references: Sequence[str]) -> float:
        if self.first_line:
            text = text.lstrip("\n").split("\n")[0]
        return max((SCORES[self.name](text, reference, self.classes) for reference in references), default=0.0)

    def is_settled(self, text: str, references: Sequence[str]) -> bool:
        return self.first_line and "\n" in text.lstrip("\n")

    def content(self) -> Any:
        return [self.name, self.first_line, self.classes]


def f1(text: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of words, without articles, punctuation and case (SQuAD's)."""
    return _f1_of(_normalized(text).split(), _normalized(reference).split())


def f1_zh(text: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the words that jieba finds, without punctuation."""
    words = [[_without_marks(word) for word in _chinese_words(each)] for each in (text, reference)]
    return _f1_of(*([word for word in each if word] for each in words))


def rouge(text: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L's F1 at summary level."""
    return rouge_l(text, reference)


def rouge_zh(text: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The same of the words that jieba finds."""
    return rouge_l(" ".join(_chinese_words(text)), " ".join(_chinese_words(reference)))


def classification(text: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the text names, if the right one is among them; classes whose names are a
    part of the right one's do not count."""
    named = [each for each in classes if each in text]
    named = [each for each in named if each == reference or each not in reference]
    return 1 / len(named) if reference in named else 0.0


def count(text: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the text that are the right one."""
    numbers = re.findall(r"\d+", text)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def retrieval(text: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The same of the paragraph's number."""
    return count(text, _PARAGRAPHS[RETRIEVAL].search(reference)[1])


def retrieval_zh(text: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The same in Chinese."""
    return count(text, _PARAGRAPHS[RETRIEVAL_ZH].search(reference)[1])


def is_reference(metric: str) -> Callable[[str], bool]:
    """What tells whether a metric, one of :data:`SCORES`, can score by a reference."""
    pattern = _PARAGRAPHS.get(metric)
    return lambda reference: pattern is None or pattern.search(reference) is not None


def code_similarity(text: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the first line that is neither a comment nor a fence, in whole per cent (`fuzz.ratio`)."""
    lines = text.lstrip("\n").split("\n")
    line = next((each for each in lines if not any(mark in each for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


SCORES: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    F1: f1,
    F1_ZH: f1_zh,
    ROUGE: rouge,
    ROUGE_ZH: rouge_zh,
    CLASSES: classification,
    COUNT: count,
    RETRIEVAL: retrieval,
    RETRIEVAL_ZH: retrieval_zh,
    CODE: code_similarity,
}


def _f1_of(words: list[str], wanted: list[str]) -> float:
    same = sum((collections.Counter(words) & collections.Counter(wanted)).values())
    return 2 * same / (len(words) + len(wanted)) if same else 0.0


def _normalized(text: str) -> str:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _without_marks(word: str) -> str:
    word = "".join(word.lower().split())
    return "".join(character for character in word if character not in string.punctuation + _CHINESE_MARKS)


def _chinese_words(text: str) -> list[str]:
    try:
        jieba = importlib.import_module("jieba")
    except ImportError as error:
        raise not_installed("the score of LongBench's Chinese data sets, by words,", "jieba", extra="eval") from error
    return list(jieba.cut(text))
