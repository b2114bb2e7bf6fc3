"""Published figures: lines of measurements, a panel for each text.

A figure has `alt`, `x` and `y` (`field`, `label`, `scale: log` where it is, `start` where the axis begins), `panels`
(`title`, and the `where` of its rows) and `series` (`label`, and `run` or `runs` and `where`, of which every row is a
point; a list `points` of these joins several; where some have `ours: true`, the others are thin and grey). `dark:
true` draws it for dark pages, too; `width` is that of a panel in inches. What is drawn has a digest, which all its
pictures carry: the SVGs, whose text is the same wherever they are made with the same matplotlib, and the PNG, whose
bytes are not.
"""

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .documents import stray_decimals
from .published import PUBLISHED, Published, ReportError, merged

DARK = "-dark"  # in the names of pictures for dark pages
_INK, _PAPER = "#c9d1d9", "#0d1117"
_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "legend.labelcolor")
_SVG = {"svg.fonttype": "none", "svg.hashsalt": "report"}
_STYLES = {
    "": _SVG,
    DARK: _SVG
    | dict.fromkeys(_INKED, _INK)
    | {"figure.facecolor": _PAPER, "axes.facecolor": _PAPER, "legend.facecolor": _PAPER},
}
_NEEDED, _AXIS = {"alt", "x", "y", "panels", "series"}, {"field", "label", "scale", "start"}
_KEYS = _NEEDED | {"dark", "width"}
_PANEL, _SERIES = {"title", "where"}, {"label", "points", "run", "runs", "where", "ours"}
_WIDTH = 4.2  # inches
_MARKERS = "s^vDPX<>"  # of the lines that are not ours


def drawing(published: Published, identifier: str) -> dict[str, Any]:
    """What a figure shows: axes, and the points of every line in every panel."""
    place, spec = f"figures.{identifier}", published.figures[identifier]
    _check(spec, _KEYS, place, needed=_NEEDED)
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
                ours = {"ours": True} if series.get("ours") else {}
                lines.append({"label": series["label"], "points": points, **ours})
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
    return {"x": spec["x"], "y": spec["y"], "panels": panels} | {
        key: spec[key] for key in ("dark", "width") if key in spec
    }


def digest(drawn: Mapping[str, Any]) -> str:
    """SHA-256 of what a figure shows, as both pictures carry it."""
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode("utf-8")).hexdigest()


def pictures(drawn: Mapping[str, Any]) -> dict[str, bytes]:
    """The figure as ending → picture: `.svg`, `.png` and, where it is drawn for dark pages, `-dark.svg`.

    Raises:
        ReportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ReportError("figures need matplotlib; pip install -c constraints.txt -e '.[eval]'") from error

    mark, made = f"data {digest(drawn)}", {}
    for style in ("", DARK) if drawn.get("dark") else ("",):
        with matplotlib.rc_context(_STYLES[style]):
            figure = _figure(drawn, grey="0.45" if style == "" else "0.65")
            metadata = {".svg": {"Description": mark, "Date": None}, ".png": {"Description": mark}}
            for form in (".svg",) if style else (".svg", ".png"):
                picture = io.BytesIO()
                figure.savefig(picture, format=form[1:], dpi=120, metadata=metadata[form])
                made[f"{style}{form}"] = picture.getvalue()
    return made


def _figure(drawn: Mapping[str, Any], *, grey: str) -> Any:
    from matplotlib.figure import Figure

    panels, width = drawn["panels"], drawn.get("width", _WIDTH)
    figure = Figure(figsize=(width * len(panels), 4.2))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    # Fixed margins: a layout that asks how wide text is depends on the machine's font library.
    left, right = 0.19 * _WIDTH / width, 0.03 * _WIDTH / width
    figure.subplots_adjust(left=left / len(panels), right=1 - right / len(panels), top=0.92, bottom=0.14, wspace=0.28)
    labels = list(dict.fromkeys(line["label"] for panel in panels for line in panel["lines"]))
    some_are_ours = any(line.get("ours") for panel in panels for line in panel["lines"])
    for axis, panel in zip(axes, panels, strict=True):
        for line in panel["lines"]:
            place = labels.index(line["label"])
            look = {"marker": "o", "markersize": 4, "color": f"C{place}"}
            if some_are_ours and line.get("ours"):
                look |= {"markersize": 6, "linewidth": 2.5}
            elif some_are_ours:
                look |= {"marker": _MARKERS[place % len(_MARKERS)], "color": grey, "linewidth": 1, "linestyle": "--"}
            axis.plot(*zip(*line["points"], strict=True), label=line["label"], **look)
        axis.set_title(panel["title"])
        axis.set(xlabel=drawn["x"]["label"], ylabel=drawn["y"]["label"])
        axis.set(xscale=drawn["x"].get("scale", "linear"), yscale=drawn["y"].get("scale", "linear"))
        for name in "xy":
            if "start" in drawn[name]:
                axis.set(**{f"{name}lim": (drawn[name]["start"], None)})
        axis.yaxis.set_major_formatter("{x:g}")
        low, high = axis.get_ylim()
        # Over more than two decades the labels between powers of ten would lie on one another.
        axis.yaxis.set_minor_formatter("{x:g}" if high < 100 * low or low <= 0 else "")
        axis.tick_params(axis="y", which="both", labelsize=8)
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize="small")
    return figure


def problems(drawn: Mapping[str, Any], base: Path) -> list[str]:
    """How the pictures of `base`, such as `base`.svg, differ from what they are to show.

    An SVG's text is compared where the installed matplotlib is the one that drew it.
    """
    found = []
    mark = f"data {digest(drawn)}".encode()
    endings = [".svg", ".png", *([f"{DARK}.svg"] if drawn.get("dark") else [])]
    for path in (picture_path(base, ending) for ending in endings):
        if not path.exists():
            found.append(f"{path.name}: is missing")
        elif mark not in path.read_bytes():
            found.append(f"{path.name}: shows other data than the results")
    if not found and f"Matplotlib v{_installed()},".encode() in base.with_suffix(".svg").read_bytes():
        for ending, picture in pictures(drawn).items():
            path = picture_path(base, ending)
            if ending.endswith(".svg") and picture != path.read_bytes():
                found.append(f"{path.name}: was changed after it was drawn")
    return found


def picture_path(base: Path, ending: str) -> Path:
    """The file of a figure's picture, of which `base` is without an ending."""
    return base.with_name(base.name + ending)


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
