"""What each token of a sentence takes: bars over tokens, a map of layers and tokens, and in words what
is seen (DynaKV, figures 4 and 5)."""

from collections.abc import Mapping, Sequence
from typing import Any

from .svg import Scale, axes, drawing, rect, text

STEP, CELL, LEFT, TOP, FOOT, END = 23.0, 9.0, 52.0, 26.0, 100.0, 14.0
_SPACES = ("Ġ", "▁")


def token_bars(tokens: Sequence[str], found: Mapping[str, Any], name: str) -> str:
    """The mean share over layers of each token."""
    means = [sum(column) / len(column) for column in zip(*found["shares"], strict=True)]
    height = 150.0
    width = LEFT + STEP * len(tokens) + END
    x = Scale(low=0, high=len(tokens), start=LEFT, end=width - END)
    y = Scale(low=0, high=max(means) * 1.08, start=TOP + height, end=TOP)
    parts = [part for part in axes(x, y, x_label="", y_label="share of a token's bytes") if "middle" not in part]
    for i, (token, mean) in enumerate(zip(tokens, means, strict=True)):
        shown = _shown(token)
        parts.append(rect(x(i) + 3, y(mean), STEP - 6, y.start - y(mean), "bar c0", title=f"{shown}: {mean:.3f}"))
        parts.append(text(x(i) + STEP / 2 + 4, y.start + 12, shown, anchor="end", turn=-60))
    return drawing(width, TOP + height + FOOT, parts, label=f"Share of its bytes that each token takes, {name}")


def heat_map(tokens: Sequence[str], layers: Sequence[int], found: Mapping[str, Any], name: str) -> str:
    """Layers (the first at the bottom) by tokens; the darker, the more bytes."""
    shares = found["shares"]
    least, most = min(min(row) for row in shares), max(max(row) for row in shares)
    width, bottom = LEFT + STEP * len(tokens) + END, TOP + CELL * len(layers)
    parts = [text(LEFT - 36, TOP - 12, f"layer; from {least:.2f} (faint) to {most:.2f} (full)", of="title")]
    for row, (layer, values) in enumerate(zip(layers, shares, strict=True)):
        y = bottom - CELL * (row + 1)
        if row % 5 == 0:
            parts.append(text(LEFT - 6, y + CELL, str(layer), anchor="end"))
        for i, value in enumerate(values):
            depth = 0.04 + 0.96 * (value - least) / max(most - least, 1e-9)
            said = f"layer {layer}, {_shown(tokens[i])}: {value:.3f}"
            parts.append(rect(LEFT + STEP * i, y, STEP - 1, CELL - 1, "heat", title=said, opacity=depth))
    for i, token in enumerate(tokens):
        parts.append(text(LEFT + STEP * (i + 0.5) + 4, bottom + 12, _shown(token), anchor="end", turn=-60))
    return drawing(width, bottom + FOOT, parts, label=f"Share of bytes by layer and token, {name}")


def in_words(found: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """(what is seen of one of the paper's three claims, whether it holds), each from the figures."""
    first, others = found["first"], found["others"]
    words = f"The first token takes {first:.3f} of its bytes, the others {others:.3f} on average."
    told = [(f"Sinks dominate: {words}", first > others)]
    rare, stopwords = found["rare"], found["stopwords"]
    if rare is not None and stopwords is not None:
        words = f"“chronic procrastination” takes {rare:.3f}, “that, to, be, just” {stopwords:.3f}."
        told.append((f"Rare words get more than functional ones: {words}", rare > stopwords))
    lower, upper = found["lower_layers"], found["upper_layers"]
    if lower is not None:  # there are two layers at least
        words = f"The lower half of the layers takes {lower:.3f}, the upper half {upper:.3f}."
        told.append((f"Lower layers get more than deeper ones: {words}", lower > upper))
    return told


def _shown(token: str) -> str:
    for mark in _SPACES:
        token = token.replace(mark, "")
    return token if len(token) <= 16 else token[:15] + "…"
