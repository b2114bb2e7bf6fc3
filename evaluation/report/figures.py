"""Published figures: lines of measurements, a panel for each text.

A figure has `alt`, `x` and `y` (`field`, `label`, and `scale: log` where it is), `panels` (`title`, and the `where` of its
rows) and `series` (`label`, and `run` or `runs` and `where`, of which every row is a point; a list `points` of these joins
several). What is drawn has a digest, which both pictures carry: the SVG, whose text is the same wherever it is made with the
same matplotlib, and the PNG, whose bytes are not.
"""

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .documents import stray_decimals
from .published import PUBLISHED, Published, ReportError, merged

_SVG = {"svg.fonttype": "none", "svg.hashsalt": "report"}
_KEYS, _AXIS = {"alt", "x", "y", "panels", "series"}, {"field", "label", "scale"}
_PANEL, _SERIES = {"title", "where"}, {"label", "points", "run", "runs", "where"}


def drawing(published: Published, identifier: str) -> dict[str, Any]:
    """What a figure shows: axes, and the points of every line in every panel."""
    place, spec = f"figures.{identifier}", published.figures[identifier]
    _check(spec, _KEYS, place, needed=_KEYS)
    for axis in ("x", "y"):
        _check(spec[axis], _AXIS, f"{place}, {axis}", needed={"field", "label"})
    panels = []
    for panel in spec["panels"]:
        _check(panel, _PANEL, f"{place}, panel {panel.get('title')!r}", needed={"title"})
        lines = []
        for series in spec["series"]:
            where = f"{place}, {panel['title']}, {series.get('label')!r}"
            _check(series, _SERIES, where, needed={"label"})
            if points := _points(published, spec, panel, series, where):
                lines.append({"label": series["label"], "points": points})
        panels.append({"title": panel["title"], "lines": lines})
        empty = {series["label"] for series in spec["series"]} - {line["label"] for line in lines}
        if len(empty) == len(spec["series"]):
            raise ReportError(f"{PUBLISHED}: {place}, panel {panel['title']!r} has no point; correct its `where`")
    for text in (spec["alt"], *(each["title"] for each in panels), *(each["label"] for each in spec["series"])):
        if strays := stray_decimals(text):
            raise ReportError(f"{PUBLISHED}: {place} holds {strays[0][1]} in a text, which nothing proves; use words")
    drawn = {line["label"] for panel in panels for line in panel["lines"]}
    for series in spec["series"]:
        if series["label"] not in drawn:
            raise ReportError(f"{PUBLISHED}: {place}, series {series['label']!r} has no point; correct its `where`")
    return {"x": spec["x"], "y": spec["y"], "panels": panels}


def digest(drawn: Mapping[str, Any]) -> str:
    """SHA-256 of what a figure shows, as both pictures carry it."""
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode("utf-8")).hexdigest()


def pictures(drawn: Mapping[str, Any]) -> dict[str, bytes]:
    """The figure as `.svg` and `.png`.

    Raises:
        ReportError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReportError("figures need matplotlib; pip install -c constraints.txt -e '.[eval]'") from error

    panels = drawn["panels"]
    with matplotlib.rc_context(_SVG):
        figure = Figure(figsize=(4.2 * len(panels), 4.2))
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        # Fixed margins: a layout that asks how wide text is depends on the machine's font library.
        figure.subplots_adjust(
            left=0.19 / len(panels), right=1 - 0.03 / len(panels), top=0.92, bottom=0.14, wspace=0.28
        )
        labels = list(dict.fromkeys(line["label"] for panel in panels for line in panel["lines"]))
        for axis, panel in zip(axes, panels, strict=True):
            for line in panel["lines"]:
                xs, ys = zip(*line["points"], strict=True)
                axis.plot(
                    xs, ys, marker="o", markersize=4, color=f"C{labels.index(line['label'])}", label=line["label"]
                )
            axis.set_title(panel["title"])
            axis.set(xlabel=drawn["x"]["label"], ylabel=drawn["y"]["label"])
            axis.set(xscale=drawn["x"].get("scale", "linear"), yscale=drawn["y"].get("scale", "linear"))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.tick_params(axis="y", which="both", labelsize=8)
            axis.grid(alpha=0.3, which="both")
        axes[0].legend(fontsize="small")
        mark = f"data {digest(drawn)}"
        made = {}
        for form, metadata in (("svg", {"Description": mark, "Date": None}), ("png", {"Description": mark})):
            picture = io.BytesIO()
            figure.savefig(picture, format=form, dpi=120, metadata=metadata)
            made[f".{form}"] = picture.getvalue()
    return made


def problems(drawn: Mapping[str, Any], base: Path) -> list[str]:
    """How the pictures `base`.svg and .png differ from what they are to show.

    The SVG's text is compared where the installed matplotlib is the one that drew it.
    """
    found = []
    mark = f"data {digest(drawn)}".encode()
    for ending in (".svg", ".png"):
        path = base.with_suffix(ending)
        if not path.exists():
            found.append(f"{path.name}: is missing")
        elif mark not in path.read_bytes():
            found.append(f"{path.name}: shows other data than the results")
    svg = base.with_suffix(".svg")
    same_maker = not found and f"Matplotlib v{_installed()},".encode() in svg.read_bytes()
    if same_maker and pictures(drawn)[".svg"] != svg.read_bytes():
        found.append(f"{svg.name}: was changed after it was drawn")
    return found


def _installed() -> str | None:
    try:
        import matplotlib
    except ImportError:
        return None
    return matplotlib.__version__


def _points(
    published: Published, spec: Mapping, panel: Mapping, series: Mapping, where: str
) -> list[tuple[float, float]]:
    own = {key: value for key, value in series.items() if key in ("run", "runs", "where")}
    found = []
    for part in series.get("points", [{}]):
        chosen = merged(merged({"where": panel.get("where", {})}, own), part)
        for short in chosen.get("runs") or [chosen.get("run")]:
            for row in published.rows(short, chosen["where"], where):
                if missing := [spec[axis]["field"] for axis in "xy" if spec[axis]["field"] not in row]:
                    raise ReportError(f"{PUBLISHED}: {where} asks for `{missing[0]}`, and rows have {', '.join(row)}")
                found.append((row[spec["x"]["field"]], row[spec["y"]["field"]]))
    return sorted(found)


def _check(value: Any, known: set[str], where: str, *, needed: set[str] = frozenset()) -> None:
    if not isinstance(value, Mapping):
        raise ReportError(f"{PUBLISHED}: {where} must be a mapping, got {value!r}")
    if unknown := sorted(set(value) - known):
        raise ReportError(f"{PUBLISHED}: {where} has the unknown key {unknown[0]!r}; use {', '.join(sorted(known))}")
    if missing := sorted(needed - set(value)):
        raise ReportError(f"{PUBLISHED}: {where} has no `{missing[0]}`")
