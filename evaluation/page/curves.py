"""Figures of lines: captured energy, allocations over layers, residuals over decoding."""

from collections.abc import Mapping, Sequence
from typing import Any

from .svg import Placed, Scale, axes, drawing, line, rect, text

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 440.0, 270.0, 52.0, 34.0, 14.0, 46.0


def lines(
    curves: Sequence[tuple[str, Sequence[float], Sequence[float], str]],
    *,
    x_label: str,
    y_label: str,
    label: str,
    y_high: float | None = None,
    y_form: str = "{:g}",
    ticks: Sequence[tuple[float, str, int]] = (),
) -> str:
    """Lines (name, xs, ys, classes); a name stands at the end of its line where there is room, none where it is empty.

    Args:
        ticks: (x, class, row) of short marks above the axis, in rows.
    """
    xs = [x for _, each, _, _ in curves for x in each]
    ys = [y for _, _, each, _ in curves for y in each]
    x = Scale(low=min(xs), high=max(xs), start=LEFT, end=WIDTH - RIGHT)
    y = Scale(low=0, high=y_high or max(ys) * 1.08, start=HEIGHT - BOTTOM, end=TOP)
    parts = axes(x, y, x_label=x_label, y_label=y_label, y_form=y_form)
    parts += [line([(x(a), y(b)) for a, b in zip(each_x, each_y, strict=True)], of) for _, each_x, each_y, of in curves]
    for at, of, row in ticks:
        parts.append(line([(x(at), y.start - 2 - 8 * row), (x(at), y.start - 8 - 8 * row)], f"tick {of}"))
    room = Placed(LEFT, TOP - 16, WIDTH - 2, HEIGHT - BOTTOM)
    for name, each_x, each_y, of in curves:
        if name:
            i = len(each_x) * 2 // 3
            parts.append(room.label(x(each_x[i]), y(each_y[i]), name, f"name {of}"))
    return drawing(WIDTH, HEIGHT, parts, label=label)


def spectrum(found: Mapping[str, Any]) -> str:
    """The energy captured by the first components: of every layer and head, and the median."""
    curves = []
    rows = [part["captured"] for part in found["parts"]]
    points = len(rows[0])
    xs = [0.0, *(found["width"] * (i + 1) / points for i in range(points))]
    for row in rows:
        curves.append(("", xs, [0.0, *row], "faint c0"))
    median = [sorted(column)[len(column) // 2] for column in zip(*rows, strict=True)]
    curves.append(("median", xs, [0.0, *median], "strong c1"))
    return lines(
        curves,
        x_label=f"components, of {found['width']}",
        y_label="energy captured",
        label=f"Energy captured by principal components: {found['states']}",
        y_high=1.0,
        y_form="{:.0%}",
    )


def spectrum_words(found: Mapping[str, Any]) -> str:
    """Ranks for 90, 95 and 99 % of the energy, in words."""
    told = []
    for i, threshold in enumerate((90, 95, 99)):
        ranks = sorted(part["ranks"][i] for part in found["parts"])
        told.append(f"{threshold} %: {ranks[0]} to {ranks[-1]}, median {ranks[len(ranks) // 2]}")
    return "; ".join(told)


def allocation(found: Mapping[str, Any], side: str, chosen: Mapping[str, str]) -> str:
    """The mean share of a token's bytes by layer, for chosen methods (label → class)."""
    curves = [
        (label, [float(layer) for layer in found["layers"]], found["methods"][label][side], of)
        for label, of in chosen.items()
    ]
    return lines(curves, x_label="layer", y_label=f"share of bytes, {side}", label=f"Allocation of {side} over layers")


def residual(found: Mapping[str, Any], side: str, colours: Mapping[str, str]) -> str:
    """The residual of the next tokens in the bases as they are (solid) and as they were calibrated (dashed), and when bases
    moved (marks above the axis)."""
    curves, ticks = [], []
    start = {"keys": "key_starts", "values": "value_starts"}[side]
    for row, (label, each) in enumerate(found.items()):
        xs = [float(position) for position in each["position"]]
        curves.append((label, xs, each[side], f"strong {colours[label]}"))
        curves.append(("", xs, each[start], f"dashed {colours[label]}"))
        ticks += [(x, colours[label], row) for x, moved in zip(xs, each["updates"], strict=True) if moved]
    return lines(
        curves,
        x_label="token",
        y_label=f"energy outside of the basis, {side}",
        label=f"Residual of {side} while decoding",
        ticks=ticks,
    )


def head_map(rows: Sequence[Mapping[str, Any]], field: str, of: float, label: str) -> str:
    """A map of layers by heads of a rank or a divergence; `of` is what a full cell is."""
    layers, heads = (sorted({row[key] for row in rows}) for key in ("layer", "head"))
    cell, left, top = 13.0, 40.0, 22.0
    parts = [text(left - 32, 14, label, of="title")]
    for row in rows:
        x, y = left + cell * layers.index(row["layer"]), top + cell * heads.index(row["head"])
        said = f"layer {row['layer']}, head {row['head']}: {row[field]:.4g}"
        parts.append(
            rect(x, y, cell - 1, cell - 1, "heat", title=said, opacity=0.04 + 0.96 * min(row[field] / of, 1.0))
        )
    for i, head in enumerate(heads):
        parts.append(text(left - 6, top + cell * i + 10, str(head), anchor="end"))
    for i, layer in enumerate(layers):
        if i % 5 == 0:
            parts.append(text(left + cell * (i + 0.5), top + cell * len(heads) + 12, str(layer), anchor="middle"))
    return drawing(left + cell * len(layers) + 8, top + cell * len(heads) + 20, parts, label=label)
