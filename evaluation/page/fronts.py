"""Pareto fronts: divergence against bytes, a panel for each text."""

import dataclasses
import math
from collections.abc import Sequence

from .points import MARKERS, WHOLE, Point, front, series_of
from .svg import Placed, Scale, axes, drawing, line, marker

COLOURS = 8
# The axis ends so many times above the front, as far as that is of use: a tenth of a nat is a tenth of the perplexity.
MARGIN, USEFUL = 1.7, 0.1
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 440.0, 360.0, 52.0, 34.0, 14.0, 46.0


def colours_of(points: Sequence[Point], field: str = "kl") -> dict[str, str]:
    """Series → class of its colour: those on a front of any text by how often they are, then those of least divergence; the
    others are grey (``rest``)."""
    texts = dict.fromkeys(point.dataset for point in points)
    counts: dict[str, int] = {}
    for dataset in texts:
        for point in front([each for each in points if each.dataset == dataset], field):
            counts[point.series] = counts.get(point.series, 0) + 1
    order = sorted(counts, key=lambda series: -counts[series])
    others = sorted(
        (point for point in points if point.family != WHOLE), key=lambda each: each.rate * max(each.values[field], 1e-9)
    )
    order += [series for series in dict.fromkeys(point.series for point in others) if series not in counts]
    return {series: f"c{i}" if i < COLOURS else "rest" for i, series in enumerate(order)}


def panel(points: Sequence[Point], colours: dict[str, str], *, field: str, y_label: str) -> tuple[str, list[str]]:
    """(the drawing, what lies beyond its axes in words) of one text."""
    shown = [point for point in points if point.family != WHOLE]
    best = front(shown, field)
    x_high = _rounded_up(1.08 * sorted(point.rate for point in shown)[min(int(0.9 * len(shown)), len(shown) - 1)])
    of_use = [point.values[field] for point in best if point.values[field] <= USEFUL] or [best[-1].values[field]]
    quarter = sorted(point.values[field] for point in shown)[len(shown) // 4]
    y_high = _rounded_up(MARGIN * max(max(of_use), min(quarter, USEFUL)))
    x = Scale(low=0, high=x_high, start=LEFT, end=WIDTH - RIGHT)
    y = Scale(low=0, high=y_high, start=HEIGHT - BOTTOM, end=TOP)
    parts = axes(x, y, x_label="bytes held, of an uncompressed cache's", y_label=y_label, x_form="{:.0%}")
    inside = [point for point in shown if point.rate <= x_high and point.values[field] <= y_high]
    room = Placed(LEFT, TOP - 16, WIDTH - 2, HEIGHT - BOTTOM)
    for point in inside:
        room.take(x(point.rate), y(point.values[field]))
    parts.append(_front_line([point for point in best if point in inside], x, y, field))
    parts += _series_lines(inside, colours, x, y, field)
    for point in sorted(inside, key=lambda each: colours[each.series] != "rest"):
        parts += _mark(point, colours[point.series], x, y, field)
    parts += _labels(inside, best, colours, x, y, field, room)
    beyond = [point for point in shown if point not in inside]
    for point in beyond:
        place = x(min(point.rate, x_high)) - (6 if point.rate > x_high else 0), y(min(point.values[field], y_high)) + 7
        shape = "up" if point.values[field] > y_high else "right"
        parts.append(marker(shape, *place, f"beyond {colours[point.series]}", title=said(point, field), size=4.5))
    label = f"{y_label} against bytes, {shown[0].dataset}; on the front: " + ", ".join(each.label for each in best)
    words = [f"{each.label} ({each.values[field]:.2g})" for each in sorted(beyond, key=lambda p: p.values[field])]
    return drawing(WIDTH, HEIGHT, parts, label=label), words


def said(point: Point, field: str) -> str:
    """What a point says when it is pointed at."""
    low, high = point.interval(field)
    bounds = f" ({low:.4f}–{high:.4f})" if low < high else ""
    return f"{point.label}: {point.rate:.3f} of the bytes, {point.values[field]:.4f}{bounds}"


def mean_points(points: Sequence[Point], field: str) -> list[Point]:
    """Each method's mean over texts, of methods that all texts have; intervals of a text do not carry over."""
    texts = len({point.dataset for point in points})
    by_label: dict[str, list[Point]] = {}
    for point in points:
        by_label.setdefault(point.label, []).append(point)
    return [
        dataclasses.replace(
            each[0],
            dataset="all texts",
            rate=sum(point.rate for point in each) / texts,
            values={field: sum(point.values[field] for point in each) / texts},
        )
        for each in by_label.values()
        if len(each) == texts
    ]


def legend(points: Sequence[Point]) -> list[tuple[str, str]]:
    """(family, drawing of its marker) of those that are there."""
    there = {point.family for point in points}
    return [
        (family, drawing(16, 16, [marker(shape, 8, 8, "key")], label=f"marker of {family}"))
        for family, shape in MARKERS.items()
        if family in there
    ]


def _front_line(best: Sequence[Point], x: Scale, y: Scale, field: str) -> str:
    """The front as steps: what is reached at so many bytes."""
    steps: list[tuple[float, float]] = []
    for point in best:
        place = x(point.rate), y(point.values[field])
        steps += [(place[0], steps[-1][1]), place] if steps else [(place[0], y.end), place]
    return line([*steps, (x.end, steps[-1][1])], "front") if steps else ""


def _series_lines(inside: Sequence[Point], colours: dict[str, str], x: Scale, y: Scale, field: str) -> list[str]:
    by_series: dict[str, list[Point]] = {}
    for point in sorted(inside, key=lambda each: each.rate):
        by_series.setdefault(point.series, []).append(point)
    return [
        line([(x(each.rate), y(each.values[field])) for each in found], f"series {colours[series]}")
        for series, found in by_series.items()
        if len(found) > 1
    ]


def _mark(point: Point, colour: str, x: Scale, y: Scale, field: str) -> list[str]:
    low, high = (min(max(bound, y.low), y.high) for bound in point.interval(field))
    place = x(point.rate), y(point.values[field])
    whisker = [line([(place[0], y(low)), (place[0], y(high))], f"whisker {colour}")] if low < high else []
    return [*whisker, marker(MARKERS[point.family], *place, colour, title=said(point, field))]


def _labels(
    inside: Sequence[Point],
    best: Sequence[Point],
    colours: dict[str, str],
    x: Scale,
    y: Scale,
    field: str,
    room: Placed,
) -> list[str]:
    """A label for each series at its point of fewest bytes, the coloured ones first."""
    ends: dict[str, Point] = {}
    for point in sorted(inside, key=lambda each: each.rate):
        ends.setdefault(point.series, point)
    on_front = {series_of(point.label) for point in best}
    order = sorted(ends.values(), key=lambda each: (colours[each.series] == "rest", each.series not in on_front))
    return [
        room.label(x(each.rate), y(each.values[field]), each.series, f"name {colours[each.series]}") for each in order
    ]


def _rounded_up(value: float) -> float:
    """The next value of one or two digits that is not less; 1 of none."""
    if value <= 0:
        return 1.0
    size = 10 ** math.floor(math.log10(value))
    return next(each * size for each in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if each * size >= value * 0.999)
