"""ROUGE-L at summary level, as the package `rouge` 1.0.1 computes it, whose scores LongBench reports.

Texts are sentences that end with full stops. The different words of the longest common subsequences, of each
sentence of the reference with each of the text, are counted, over the different words of the reference (recall) and
of the text (precision).
"""

from collections.abc import Sequence

_EPSILON = 1e-8


def rouge_l(text: str, reference: str) -> float:
    """F1 of ROUGE-L; 0 where either has no sentence."""
    sentences, wanted = _sentences(text), _sentences(reference)
    if not sentences or not wanted:
        return 0.0
    common: set[str] = set()
    for right in wanted:
        for sentence in sentences:
            common.update(_common_words(right, sentence))
    recall = len(common) / len({word for sentence in wanted for word in sentence})
    precision = len(common) / len({word for sentence in sentences for word in sentence})
    return 2 * precision * recall / (precision + recall + _EPSILON)


def _sentences(text: str) -> list[list[str]]:
    # A piece of white space is a sentence of one empty word, as in the package.
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _common_words(first: Sequence[str], second: Sequence[str]) -> set[str]:
    """Words of a longest common subsequence; of several it is the one that leaves out words of `second` last."""
    lengths = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, word in enumerate(first, 1):
        for j, other in enumerate(second, 1):
            lengths[i][j] = lengths[i - 1][j - 1] + 1 if word == other else max(lengths[i - 1][j], lengths[i][j - 1])
    found, i, j = set(), len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            found.add(first[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found
