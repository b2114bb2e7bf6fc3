"""Writing what is published into the documents, or checking that it stands there."""

from collections.abc import Iterator
from pathlib import Path

from lowrank_kv.utils import atomic_write, run_record

from . import documents, figures, tables
from .published import PUBLISHED, Published, ReportError

RESULTS, FIGURES = Path("results"), Path("docs/figures")
EXEMPT = Path("docs/log")  # what was tried, with the figures of the day


def document_paths(root: Path) -> list[Path]:
    """README.md and everything under docs/ but the log."""
    found = sorted(path for path in (root / "docs").rglob("*.md") if not path.is_relative_to(root / EXEMPT))
    return [path for path in [root / "README.md", *found] if path.exists()]


def publish(root: Path) -> list[Path]:
    """Write tables and numbers into the documents and draw the figures; returns the files that changed.

    Raises:
        ReportError: a published value cannot be made, or a document asks for what is not published; nothing is written.
    """
    published = Published(root / RESULTS)
    texts, used = _filled(root, published)
    changes = {path: text.encode("utf-8") for path, text in texts.items()}
    for identifier in published.figures:
        base, drawn = root / FIGURES / identifier, figures.drawing(published, identifier)
        if figures.problems(drawn, base):
            pictures = figures.pictures(drawn).items()
            changes |= {figures.picture_path(base, ending): data for ending, data in pictures}
    changed = [path for path, data in changes.items() if not path.exists() or path.read_bytes() != data]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write.write_bytes(path, changes[path])
    return changed


def problems(root: Path) -> list[str]:
    """Everything that keeps the documents from being what the results say, in words; empty when all is well."""
    found = list(_damaged_records(root))
    try:
        published = Published(root / RESULTS)
        texts, used = _filled(root, published)
        for identifier in published.figures:
            found += figures.problems(figures.drawing(published, identifier), root / FIGURES / identifier)
    except ReportError as error:
        return [*dict.fromkeys([*found, str(error)])]
    found += [
        f"{PUBLISHED}: no document uses `{identifier}`; use it or remove it"
        for identifier in sorted(published.ids - used)
    ]
    for path, text in texts.items():
        name, written = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        found += [f"{name}: {difference}" for difference in _differences(written, text)]
        found += [
            f"{name}:{line}: nothing proves {number}; publish it, put it in words, or say why not by "
            "`<!-- not measured here: REASON -->`"
            for line, number in documents.stray_decimals(written)
        ]
    return found


def _filled(root: Path, published: Published) -> tuple[dict[Path, str], set[str]]:
    """(every document as it is to be, the ids that they use)."""
    used: set[str] = set()
    texts = {}
    for path in document_paths(root):
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        if lines := documents.broken_markers(text):
            raise ReportError(
                f"{name}:{lines[0]}: a marker without its partner; write <!-- report:ID -->…<!-- /report -->"
            )

        def content(identifier: str, block: bool, name: str = name, path: Path = path) -> str:
            if identifier not in published.ids:
                raise ReportError(
                    f"{name}: `{identifier}` is not published; add it to {PUBLISHED} or remove the marker"
                )
            if block == (identifier in published.numbers):
                place = "a place within a line" if block else "lines of their own"
                raise ReportError(f"{name}: the markers of `{identifier}` need {place}")
            used.add(identifier)
            return _content(root, published, identifier, path, used)

        texts[path] = documents.filled(text, content)
    return texts, used


def _content(root: Path, published: Published, identifier: str, document: Path, used: set[str]) -> str:
    if identifier in published.numbers:
        return tables.number(published, identifier)
    published.touched.clear()
    if identifier in published.tables:
        lines = tables.table(published, identifier, used.add)
        return "\n".join([*lines, "", tables.sources(published, document)])
    drawn = figures.drawing(published, identifier)
    picture = tables.relative(root / FIGURES / f"{identifier}.svg", document.parent)
    alt = published.figures[identifier]["alt"]
    shown = f"![{alt}]({picture})"
    if drawn.get("dark"):
        dark = tables.relative(root / FIGURES / f"{identifier}{figures.DARK}.svg", document.parent)
        source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        shown = f'<picture>{source}<img alt="{alt}" src="{picture}"></picture>'
    return f"{shown}<br>{tables.sources(published, document)}"


def _damaged_records(root: Path) -> Iterator[str]:
    """Every run must be whole, published or not."""
    for path in sorted((root / RESULTS).glob("*/*")):
        if path.suffix != ".json" or path.parent.name not in run_record.KINDS:
            yield f"{path.relative_to(root).as_posix()}: is no run record; results/ holds <kind>/<run id>.json alone"
            continue
        try:
            run_record.load(path)
        except run_record.RecordError as error:
            yield f"results/{error}"


def _differences(written: str, wanted: str) -> Iterator[str]:
    """Marker by marker, what a document says and what the results say."""
    pairs = zip(documents.markers(written), documents.markers(wanted), strict=True)
    for here, there in pairs:
        old = written[here.start("content") : here.end("content")].strip().split("\n")
        new = wanted[there.start("content") : there.end("content")].strip().split("\n")
        if old != new:
            line, (said, right) = next((i, pair) for i, pair in enumerate(_padded(old, new)) if pair[0] != pair[1])
            number = written.count("\n", 0, here.start("content")) + 1 + line
            yield f"line {number}: `{here.group('id')}` says {said!r}, the results {right!r}; run python -m scripts.report"


def _padded(old: list[str], new: list[str]) -> list[tuple[str, str]]:
    length = max(len(old), len(new))
    return list(zip(old + [""] * (length - len(old)), new + [""] * (length - len(new)), strict=True))
