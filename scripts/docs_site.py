"""What the documentation site shows beside docs/: the README as its first page, CONTRIBUTING, CHANGELOG, and linked files.

MkDocs calls this (`hooks` in mkdocs.yml). It takes pages from docs/ only, so the files of the repository that pages link to
become files of the site, and the links are written anew. A link to nothing stays as it is, and a strict build fails.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r'(?P<before>\]\(|srcset="|src=")(?P<target>[^)"#:\s]+)(?P<anchor>#[^)"\s]*)?(?P<after>[)"])')
_HTML_LINK = re.compile(r'<a href="([^":]+)">([^<]*)</a>')
_FENCED = re.compile(r"(^```.*?^```$)", re.S | re.M)
_LOG = "log/"


def on_config(config: Any) -> Any:
    """The log's pages, each a topic, are listed from the folder; pages that mkdocs.yml does not place stand under More."""
    pages = sorted(path.name for path in (ROOT / "docs" / _LOG).glob("*.md") if path.name != "README.md")
    entries = [entry for part in config["nav"] for entry in _entries(part)]
    for entry in entries:
        if entry.get("Log") == "LOG":
            entry["Log"] = [f"{_LOG}README.md", *(f"{_LOG}{name}" for name in pages)]
    placed = {place for entry in entries for place in entry.values() if isinstance(place, str)}
    if rest := sorted({path.name for path in (ROOT / "docs").glob("*.md")} - placed):
        config["nav"].append({"More": rest})
    return config


def _entries(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The pages of a part of the navigation, or the page that it is."""
    [content] = part.values()
    return content if isinstance(content, list) else [part]


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages above, and every file of the repository that a page links to."""
    from mkdocs.structure.files import File

    texts = {file.src_uri: Path(file.abs_src_path).read_text(encoding="utf-8") for file in files.documentation_pages()}
    sources = {uri: f"docs/{uri}" for uri in texts}
    for source, uri in PAGES.items():
        sources[uri] = source
        texts[uri] = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=texts[uri]))
    linked = {path for uri, text in texts.items() for path in _targets(text, sources[uri])}
    for path in sorted(linked):
        if not path.startswith("docs/") and path not in PAGES and (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Write links from where a page lies in the repository to where things lie in the site. What a page folds is Markdown
    here when it says so, and on GitHub behind a blank line."""
    uri = page.file.src_uri
    source = next((source for source, place in PAGES.items() if place == uri), f"docs/{uri}")

    def rewritten(match: re.Match) -> str:
        path = _resolved(source, match["target"])
        place = PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(place) is None:
            return match[0]
        target = posixpath.relpath(place, posixpath.dirname(uri) or ".")
        if match["before"] != "](" and page.url != "":  # raw HTML, which MkDocs leaves alone
            target = posixpath.relpath(place, page.url)
        return f"{match['before']}{target}{match['anchor'] or ''}{match['after']}"

    parts = _FENCED.split(_in_markdown(markdown))
    parts[::2] = [_LINK.sub(rewritten, part).replace("<details>", '<details markdown="1">') for part in parts[::2]]
    return "".join(parts)


def _in_markdown(text: str) -> str:
    """The text with links as MkDocs checks them: GitHub takes those of a folded line in HTML alone."""
    return _HTML_LINK.sub(r"[\2](\1)", text)


def _targets(text: str, source: str) -> set[str]:
    """Paths in the repository that a page links to."""
    prose = "".join(_FENCED.split(_in_markdown(text))[::2])
    return {_resolved(source, match["target"]) for match in _LINK.finditer(prose)}


def _resolved(source: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Docstrings name others by Sphinx's roles (``:func:`name```); a reader sees the name. Paths in tables may go on in the
    next line, behind a slash."""
    html = re.sub(r":(?:func|class|meth|attr|data|mod):(<code>)~?", r"\1", html)
    return re.sub(r"<td.*?</td>", _with_divisible_paths, html, flags=re.S)


def _with_divisible_paths(cell: re.Match) -> str:
    return re.sub(r"<code>[^<]*", lambda code: code[0].replace("/", "/<wbr>"), cell[0])
