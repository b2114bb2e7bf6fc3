"""The documentation site: it builds strictly, every link in it leads somewhere, and every command in it is one there is."""

import ast
import html
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote

import pytest

from evaluation.peers import PEERS
from lowrank_kv_cli.__main__ import COMMANDS
from scripts.count_readme import counts

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def build(config: Path, site: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", site]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", directory)
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


def test_every_link_of_the_built_pages_leads_somewhere(site):
    missing, checked = [], 0
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for target in re.findall(r'(?:href|src|srcset)="([^"]+)"', page.read_text(encoding="utf-8")):
            path = unquote(target.partition("#")[0])
            if not path or re.match(r"[a-z]+:|//", path):
                continue
            checked += 1
            found = (page.parent / path).resolve()
            if not (found.is_file() or (found / "index.html").is_file()):
                missing.append(f"{page.relative_to(site)}: {target}")
    assert not missing
    assert checked > 1000


def test_the_first_page_is_the_readme_with_its_figure_in_both_colours(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    assert "How it works" in text
    assert 'srcset="figures/quality-against-bytes-dark.svg"' in text
    assert (site / "figures/quality-against-bytes-dark.svg").is_file()
    assert list((site / "results/quality").glob("*.json"))


def test_the_api_page_has_the_docstrings(site):
    text = (site / "api/index.html").read_text(encoding="utf-8")
    assert "generate()" in text
    assert ":func:" not in text
    for name in ("compress", "uncompress", "DynaKVCache", "OjaKVConfig", "MemoryReport"):
        assert f">{name}" in text


def test_what_is_folded_is_shown_as_what_is_not(site):
    folded = re.findall(r"<details.*?</details>", (site / "index.html").read_text(encoding="utf-8"), re.S)
    *answers, pictures, more_pictures, table = folded
    assert len(answers) == 3
    assert '<a href="models/">' in "".join(answers)
    for each in (pictures, more_pictures):
        assert each.count("<picture>") == 2
        assert each.count('<sub>Runs: <a href="') == 2
    assert "<table>" in table
    assert "|" not in re.sub(r"<code>.*?</code>", "", "".join(folded))


def test_long_paths_in_tables_may_be_divided_and_nothing_else(site):
    text = (site / "reliability/index.html").read_text(encoding="utf-8")
    assert "<code>tests/<wbr>contracts/<wbr>test_cut_short.py</code>" in text
    assert "<wbr>" not in re.sub(r"<td.*?</td>", "", text, flags=re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_figure_begins_a_line_within_a_sentence(page):
    """A line that begins with a comment ends the paragraph before it, on GitHub as in the site."""
    lines = page.read_text(encoding="utf-8").splitlines()
    pairs = zip(["", *lines], lines, strict=False)
    broken = [line for before, line in pairs if before.strip() and re.match(r"\s*<!-- report:[^>]*-->.", line)]
    assert broken == []


def test_badges_are_true():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    badges = {path.stem: path.read_text() for path in (ROOT / "docs/figures/badges").glob("*.svg")}
    assert f">{html.escape(project['requires-python'])}<" in badges["python"]
    assert f">{project['license']}<" in badges["licence"]
    assert "run: .ci/run" in (ROOT / ".github/workflows/ci.yml").read_text()
    assert ">.ci/run<" in badges["ci"]


def test_a_broken_link_fails_the_build(tmp_path):
    for name in ("docs", "scripts", "results", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").unlink()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[there](there.md) [a record](../results/quality/none.json)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: broken\ndocs_dir: docs\nvalidation: {links: {not_found: warn}}\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    assert "there.md" in done.stderr


def test_every_command_in_the_pages_is_one_there_is():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"\blowrank-kv ([a-z][a-z-]*)", "\n".join(re.findall(r"`[^`]+`", text))):
            assert name in COMMANDS, f"{page.name}: there is no `lowrank-kv {name}`"
        for name in re.findall(r"`make ([a-z-]+)`", text):
            assert name in targets, f"{page.name}: there is no `make {name}`"
        for name in re.findall(r"(?<![\w/])(configs/[\w./-]+\.yaml|scripts/\w+\.py)\b", text):
            assert (ROOT / name).is_file(), f"{page.name} names {name}"


def test_make_help_lists_every_target():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    [phony] = re.findall(r"^\.PHONY: (.*)$", text, re.M)
    assert set(re.findall(r"^([a-z-]+):.*## ", text, re.M)) == set(phony.split())


def said_by_the_code() -> str:
    """All text of the packages, with a mark where a value is put in."""
    found = []
    for package in ("lowrank_kv", "lowrank_kv_auto", "lowrank_kv_cli", "dynakv", "ojakv", "training"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = node.values
                    found.append("".join(p.value if isinstance(p, ast.Constant) else "\0" for p in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_the_errors_that_are_explained_are_those_of_the_code():
    said, checked = said_by_the_code(), 0
    for line in (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8").splitlines():
        shown = re.match(r"\| (`+)(.+?)\1", line)
        if shown is None:
            continue
        # A word in backticks, a number and … stand for values.
        for piece in re.split(r"`[^`]*`|\d+|…", shown[2]):
            if len(piece.strip()) >= 8:
                checked += 1
                assert piece.strip(" ;?") in said, f"nothing says {piece!r}"
    assert checked >= 18


def sentences_of(markdown: str) -> list[str]:
    """Of the prose: without code, tables, headings, pictures, comments and the targets of links."""
    prose = re.sub(r"```.*?```|<!--.*?-->|<[^>]+>", " ", markdown, flags=re.S)
    prose = re.sub(r"(?<!!)\[([^]]*)\]\([^)]*\)", r"\1", prose)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "#", "!"))]
    paragraphs = re.split(r"\n\s*\n|^- ", "\n".join(lines), flags=re.M)
    return [each for part in paragraphs for each in re.split(r"(?<=[.!?])\**\s+", " ".join(part.split())) if each]


def test_the_readme_is_short():
    found = counts((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found["lines"] <= 120
    assert found["words"] <= 1000
    assert found["python"] <= 40
    assert found["figures"] == 6
    assert found["folded"] == 6


@pytest.mark.parametrize("page", ["README.md", "docs/quick-start.md"])
def test_sentences_of_the_first_pages_are_short(page):
    sentences = sentences_of((ROOT / page).read_text(encoding="utf-8"))
    assert len(sentences) > 20
    assert [each for each in sentences if len(each.split()) > 30] == []


def test_sentences_are_told_from_what_is_none():
    markdown = (
        "# A head\n\n![a picture](p.svg)\nOne: of a\n[link](two.md), `x.y`. **Two.** Three\n\n- four\n- five\n\n| a | b |\n"
        "\n```bash\ncode here. And here.\n```\n"
    )
    assert sentences_of(markdown) == ["One: of a link, `x.y`.", "**Two.", "Three", "four", "five"]


def test_counts_of_a_readme():
    text = (
        "# A\n[![b](https://img.shields.io/b)](x) ![f](f.svg) <img alt='g' src='g.png'>\n<details>\n```py\nx = 1\n```\n"
    )
    assert counts(text) == {"lines": 6, "words": 13, "prose": 2, "python": 5, "figures": 2, "folded": 1}
    assert counts("no code")["python"] is None


def test_the_page_of_comparisons_says_what_is_simplified_in_each_peer():
    rows = [line.split("|") for line in (ROOT / "docs/comparing.md").read_text(encoding="utf-8").splitlines()]
    told = {name: row[-2].strip() for row in rows if len(row) == 6 for name in re.findall(r"`([\w-]+)`", row[1])}
    assert {name: told.get(name) for name in PEERS} == {name: peer.simplified for name, peer in PEERS.items()}
