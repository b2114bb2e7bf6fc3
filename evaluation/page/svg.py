"""The few shapes that the page's figures are made of, as SVG text. Colours are classes, set for light and for dark.

Coordinates are those of the drawing, y downwards.
"""

import dataclasses
import math
from collections.abc import Sequence
from html import escape

CHARACTER = 6.3  # width of a character of the small text, about
LINE = 13.0  # height of a line of it
MOST_GROWTH = 1.4  # a drawing is never shown larger than this


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """A linear axis: from `low`…`high` to `start`…`end`."""

    low: float
    high: float
    start: float
    end: float

    def __post_init__(self):
        if not self.high > self.low:  # a single value, or zeros alone
            object.__setattr__(self, "high", self.low + 1)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round values within."""
        rough = (self.high - self.low) / count
        size = 10 ** math.floor(math.log10(rough))
        step = next(each * size for each in (1, 2, 2.5, 5, 10) if each * size >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [round(i * step, 10) for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def drawing(width: float, height: float, parts: Sequence[str], *, label: str) -> str:
    """A whole figure that fits its place. `label` is read out to those who do not see it."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="max-width:{MOST_GROWTH * width:.0f}px" role="img" '
        f'aria-label="{escape(label, quote=True)}">' + "".join(parts) + "</svg>"
    )


def text(x: float, y: float, content: str, *, anchor: str = "start", of: str = "", turn: float = 0) -> str:
    """One line of text. `of` are classes, `turn` degrees around its point."""
    turned = f' transform="rotate({turn:g} {x:.1f} {y:.1f})"' if turn else ""
    classes = f' class="{of}"' if of else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{classes}{turned}>{escape(content)}</text>'


def line(points: Sequence[tuple[float, float]], of: str) -> str:
    """A line through points."""
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" class="line {of}"/>'


def rect(
    x: float, y: float, width: float, height: float, of: str, *, title: str = "", opacity: float | None = None
) -> str:
    """A filled rectangle, and what is said when it is pointed at."""
    said = f"<title>{escape(title)}</title>" if title else ""
    faint = "" if opacity is None else f' fill-opacity="{opacity:.3f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{of}"{faint}>{said}</rect>'


def marker(shape: str, x: float, y: float, of: str, *, title: str = "", size: float = 5) -> str:
    """A marker of one of the shapes circle, square, triangle, diamond, star, cross, minus, up and right (arrows)."""
    said = f"<title>{escape(title)}</title>" if title else ""
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size * 0.95:.1f}" class="mark {of}">{said}</circle>'
    path = " ".join(
        f"{'M' if i == 0 else 'L'}{x + size * dx:.1f},{y + size * dy:.1f}" for i, (dx, dy) in enumerate(_SHAPES[shape])
    )
    return f'<path d="{path}Z" class="mark {of}">{said}</path>'


def _star() -> list[tuple[float, float]]:
    turns = [(i, 1.35 if i % 2 == 0 else 0.6) for i in range(10)]
    return [(r * math.sin(math.pi * i / 5), -r * math.cos(math.pi * i / 5)) for i, r in turns]


_SHAPES = {
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "triangle": [(0, -1.15), (1.05, 0.8), (-1.05, 0.8)],
    "diamond": [(0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)],
    "star": _star(),
    "cross": [
        *((-1.1, -0.7), (-0.7, -1.1), (0, -0.4), (0.7, -1.1), (1.1, -0.7), (0.4, 0)),
        *((1.1, 0.7), (0.7, 1.1), (0, 0.4), (-0.7, 1.1), (-1.1, 0.7), (-0.4, 0)),
    ],
    "minus": [(-1.2, -0.45), (1.2, -0.45), (1.2, 0.45), (-1.2, 0.45)],
    "up": [(0, -1.2), (1, 0.2), (0.35, 0.2), (0.35, 1.2), (-0.35, 1.2), (-0.35, 0.2), (-1, 0.2)],
    "right": [(1.2, 0), (-0.2, 1), (-0.2, 0.35), (-1.2, 0.35), (-1.2, -0.35), (-0.2, -0.35), (-0.2, -1)],
}


def axes(x: Scale, y: Scale, *, x_label: str, y_label: str, x_form: str = "{:g}", y_form: str = "{:g}") -> list[str]:
    """Grid lines, tick labels and titles of a panel."""
    parts = []
    for value in y.ticks():
        parts += [
            line([(x.start, y(value)), (x.end, y(value))], "grid"),
            text(x.start - 6, y(value) + 4, y_form.format(value), anchor="end"),
        ]
    for value in x.ticks():
        parts.append(text(x(value), y.start + 16, x_form.format(value), anchor="middle"))
    parts += [
        line([(x.start, y.start), (x.end, y.start)], "axis"),
        text(x.end, y.start + 32, x_label, anchor="end", of="title"),
        text(x.start - 36, y.end - 10, y_label, of="title"),
    ]
    return parts


class Placed:
    """Where labels have found room, so that no two lie on one another.

    Args:
        left, top, right, bottom: bounds that no label leaves.
    """

    def __init__(self, left: float, top: float, right: float, bottom: float):
        self._bounds = left, top, right, bottom
        self._taken: list[tuple[float, float, float, float]] = []

    def take(self, x: float, y: float, size: float = 6) -> None:
        """A marker stands here."""
        self._taken.append((x - size, y - size, x + size, y + size))

    def label(self, x: float, y: float, content: str, of: str) -> str:
        """The label beside its point where there is room, else nothing."""
        width = CHARACTER * len(content)
        for dx, dy, anchor in _SIDES:
            left = {"start": x + dx, "end": x + dx - width, "middle": x + dx - width / 2}[anchor]
            box = left, y + dy - LINE + 3, left + width, y + dy + 3
            if self._is_free(box):
                self._taken.append(box)
                return text(x + dx, y + dy, content, anchor=anchor, of=of)
        return ""

    def _is_free(self, box: tuple[float, float, float, float]) -> bool:
        left, top, right, bottom = self._bounds
        if box[0] < left or box[1] < top or box[2] > right or box[3] > bottom:
            return False
        return not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in self._taken)


# Places of a label around its point, the best first.
_SIDES = (
    *((9, 4, "start"), (-9, 4, "end"), (0, -10, "middle"), (0, 18, "middle")),
    *((9, -10, "start"), (9, 18, "start"), (-9, -10, "end"), (-9, 18, "end")),
    *((9, -24, "start"), (9, 32, "start"), (-9, -24, "end"), (-9, 32, "end")),
)
