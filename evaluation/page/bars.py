"""Bars of one text, where every method stands at one budget, and of any named values."""

from collections.abc import Mapping, Sequence

from .points import WHOLE, Point
from .svg import CHARACTER, Scale, drawing, line, rect, text

ROW, RIGHT, TOP = 20.0, 84.0, 6.0


def has_one_budget(points: Sequence[Point]) -> bool:
    """Whether no method of a text is there twice, so that a curve would have one point."""
    series = [point.series for point in points if point.family != WHOLE]
    return len(set(series)) == len(series)


def bars(points: Sequence[Point], colours: Mapping[str, str], *, field: str, label: str) -> str:
    """Divergences of one text, the least first; those of more than four times the median end in an arrow."""
    shown = sorted((each for each in points if each.family != WHOLE), key=lambda each: each.values[field])
    rows = [(f"{point.label}, {point.rate:.0%}", point.values[field], colours[point.series]) for point in shown]
    bounds = [point.interval(field) for point in shown]
    return horizontal(rows, label=label, bounds=bounds, form="{:.4f}")


def horizontal(
    rows: Sequence[tuple[str, float, str]],
    *,
    label: str,
    bounds: Sequence[tuple[float, float]] | None = None,
    form: str = "{:.2f}",
    width: float = 440.0,
) -> str:
    """A bar for each (name, value, class of its colour), none below zero; those far beyond the median are cut, and
    end in an arrow."""
    names = max(len(name) for name, _, _ in rows)
    values = sorted(value for _, value, _ in rows)
    most = min(values[-1], 4 * max(values[len(values) // 2], 1e-12)) or 1.0
    x = Scale(low=0, high=most, start=min(names * CHARACTER + 10, width / 2), end=width - RIGHT)
    parts = []
    for i, (name, value, colour) in enumerate(rows):
        y = TOP + i * ROW
        end = x(min(max(value, 0.0), most))
        parts.append(text(x.start - 6, y + 12, name, anchor="end"))
        parts.append(
            rect(
                x.start, y + 2, max(end - x.start, 0.5), ROW - 7, f"bar {colour}", title=f"{name}: {form.format(value)}"
            )
        )
        if bounds is not None and bounds[i][0] < bounds[i][1] <= most:
            parts.append(line([(x(bounds[i][0]), y + 8.5), (x(bounds[i][1]), y + 8.5)], "whisker ink"))
            end = max(end, x(bounds[i][1]))
        arrow = " →" if value > most else ""
        parts.append(text(end + 6, y + 12, form.format(value) + arrow, of="number"))
    return drawing(width, TOP * 2 + ROW * len(rows), parts, label=label)
