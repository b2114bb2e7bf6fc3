"""Markers in documents, and decimal numbers that stand outside of them.

``<!-- report:ID -->…<!-- /report -->`` holds what is published as ID: a number where it stands in a line, a table or a
figure where the opening marker has a line of its own; behind a figure the closing one need not. Markers in code are text.

Outside of markers and of code no decimal number may stand in a document, for nothing proves it. Versions may ("Python 3.11",
"2.13.0", "Llama-3.1"), and lines that end with ``<!-- not measured here: REASON -->``.
"""

import re
from collections.abc import Callable

_OPEN, _CLOSE = "<!-- report:", "<!-- /report -->"
_MARKED = re.compile(r"<!-- report:(?P<id>[\w.-]+) -->(?P<content>.*?)<!-- /report -->", re.S)
_FENCE = re.compile(r"^ {0,3}(```+|~~~+).*?(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", re.S | re.M)
_CODE = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\s*\n).)+?)(?<!`)\1(?!`)", re.S)
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_TARGET = re.compile(r"\]\([^)]*\)|<https?://[^>]*>|https?://\S+")
_ESCAPE = re.compile(r"<!-- not measured here:(?P<reason>.*?)-->")
_VERSIONED = "Python|glibc|torch|transformers|accelerate|CUDA|gcc|Triton|matplotlib|DeepSpeed"
_VERSION = re.compile(rf"\b(?:{_VERSIONED}) +[≥>=]* *\d+\.\d+")
_DECIMAL = re.compile(r"(?<![\w.])(?<![A-Za-z]-)\d[\d,]*\.\d+(?!\d|\.\d)")


def markers(text: str) -> list[re.Match]:
    """The markers of a document, in order; :attr:`Match.span` is that in the document."""
    masked = _without_code(text)
    return list(_MARKED.finditer(masked))


def broken_markers(text: str) -> list[int]:
    """Lines of markers without a partner."""
    masked = _blank(_MARKED, _without_code(text))
    return [line for line, content in enumerate(masked.split("\n"), 1) if _OPEN in content or _CLOSE in content]


def is_block(text: str, marker: re.Match) -> bool:
    """Whether the opening marker has a line of its own."""
    before = text[text.rfind("\n", 0, marker.start()) + 1 : marker.start()]
    return not before.strip() and text[marker.start("content") : marker.start("content") + 1] == "\n"


def filled(text: str, content: Callable[[str, bool], str]) -> str:
    """The document with every marker's content made anew.

    Args:
        content: of (id, whether it is a block).
    """
    parts, end = [], 0
    for marker in markers(text):
        block = is_block(text, marker)
        made = content(marker.group("id"), block)
        last = "\n" if text[marker.end("content") - 1] == "\n" else ""  # the closing marker stays where it is
        parts += [text[end : marker.start("content")], f"\n{made}{last}" if block else made]
        end = marker.end("content")
    return "".join([*parts, text[end:]])


def stray_decimals(text: str) -> list[tuple[int, str]]:
    """(line, number) of every decimal number that nothing proves."""
    escaped = {
        line
        for line, content in enumerate(text.split("\n"), 1)
        if (found := _ESCAPE.search(content)) and found.group("reason").strip()
    }
    masked = _without_code(text)
    for pattern in (_MARKED, _COMMENT, _TARGET, _VERSION):
        masked = _blank(pattern, masked)
    return [
        (line, match.group())
        for line, content in enumerate(masked.split("\n"), 1)
        if line not in escaped
        for match in _DECIMAL.finditer(content)
    ]


def _without_code(text: str) -> str:
    return _blank(_CODE, _blank(_FENCE, text))


def _blank(pattern: re.Pattern, text: str) -> str:
    """The text, as long and with as many lines, with blanks where the pattern was."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
