"""Documents say what the results say: what the report writes, and everything that its check finds."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from ready_python import program

from evaluation.report import documents, figures
from evaluation.report.publish import problems, publish
from evaluation.report.published import Published, ReportError
from lowrank_kv.utils import run_record

ROOT = Path(__file__).parents[2]
README = """# A project

At a third of the bytes it has <!-- report:ratio --><!-- /report --> of the full cache's perplexity (Python 3.11, `0.3`).

<!-- report:demo -->
<!-- /report -->

```bash
run --rate 0.3
```
"""
DOCUMENT = """# More

<!-- report:curve -->
<!-- /report -->

Over all texts: <!-- report:spread --><!-- /report -->.
"""
ROWS = [
    {"method": "full", "dataset": "news", "rate": 1.0, "perplexity": 20.0, "ratio": 1.0},
    {"method": "dynakv", "dataset": "news", "rate": 0.3, "perplexity": 21.25, "ratio": 1.0625},
    {"method": "full", "dataset": "books", "rate": 1.0, "perplexity": 30.0, "ratio": 1.0},
    {"method": "dynakv", "dataset": "books", "rate": 0.31, "perplexity": 33.0, "ratio": 1.1},
]


def published(run: str) -> dict:
    return {
        "runs": {"a": run},
        "numbers": {
            "ratio": {"run": "a", "where": {"method": "dynakv", "dataset": "news"}, "field": "ratio", "format": ".3f"},
            "spread": {"run": "a", "where": {"method": "dynakv"}, "field": "ratio", "format": ".2f", "show": "range"},
            "bytes": {"run": "a", "where": {"method": "dynakv", "dataset": "news"}, "field": "rate", "format": ".2f"},
        },
        "tables": {
            "demo": {
                "run": "a",
                "format": ".2f",
                "columns": [
                    {"title": "method", "label": True},
                    {
                        "title": "news, bytes {bytes}",
                        "key": "news",
                        "where": {"dataset": "news"},
                        "field": "perplexity",
                    },
                    {"title": "both", "field": "ratio", "each": [{"where": {"dataset": d}} for d in ("news", "books")]},
                ],
                "rows": [
                    {"label": "full cache", "where": {"method": "full"}, "cells": {"both": "–"}},
                    {"label": "`dynakv`", "where": {"method": "dynakv"}, "bold": ["news"]},
                ],
            }
        },
        "figures": {
            "curve": {
                "alt": "Perplexity against bytes",
                "x": {"field": "rate", "label": "bytes"},
                "y": {"field": "ratio", "label": "perplexity", "scale": "log"},
                "panels": [{"title": text, "where": {"dataset": text}} for text in ("news", "books")],
                "series": [{"label": "dynakv", "run": "a", "where": {"method": "dynakv"}}],
            }
        },
    }


@pytest.fixture(scope="module")
def published_root(tmp_path_factory):
    """A repository whose documents are as the results say."""
    root = tmp_path_factory.mktemp("published")
    record = run_record.new_record("quality", config={"x": 1}, inputs=[], n={"blocks": 2}, rows=ROWS, argv=["x"])
    path = run_record.write(record, root / "results")
    (root / "docs").mkdir()
    (root / "README.md").write_text(README)
    (root / "docs" / "more.md").write_text(DOCUMENT)
    set_published(root, published(path.stem))
    publish(root)
    assert problems(root) == []
    return root


@pytest.fixture
def root(published_root, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(published_root, tmp_path, dirs_exist_ok=True)


def set_published(root: Path, values: dict) -> None:
    (root / "results" / "published.yaml").write_text(yaml.safe_dump(values, allow_unicode=True, sort_keys=False))


def change_published(root: Path, change) -> None:
    values = yaml.safe_load((root / "results" / "published.yaml").read_text())
    change(values)
    set_published(root, values)


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def only_problem(root: Path) -> str:
    (problem,) = problems(root)
    return problem


def test_tables_and_numbers_stand_in_the_documents(root):
    run = Published(root / "results").path_of("a")
    text = (root / "README.md").read_text()
    assert "<!-- report:ratio -->1.062<!-- /report -->" in text
    table = f"""<!-- report:demo -->
| method | news, bytes 0.30 | both |
|---|--:|--:|
| full cache | 20.00 | – |
| `dynakv` | **21.25** | 1.06 / 1.10 |

<sub>Runs: [{run.stem[-6:]}](results/quality/{run.name})</sub>
<!-- /report -->"""
    assert table in text
    more = (root / "docs" / "more.md").read_text()
    assert "<!-- report:spread -->1.06 to 1.10<!-- /report -->" in more
    assert "![Perplexity against bytes](figures/curve.svg)" in more
    assert f"(../results/quality/{run.name})" in more


def test_a_closing_marker_may_stand_behind_a_figure(root):
    more = root / "docs" / "more.md"
    replace(more, "</sub>\n<!-- /report -->", "</sub><!-- /report -->")
    assert problems(root) == []
    before = more.read_text()
    replace(more, "figures/curve.svg", "figures/other.svg")
    assert len(problems(root)) == 1
    publish(root)
    assert more.read_text() == before


def test_publishing_again_changes_nothing(root):
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert publish(root) == []
    assert before == {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("old", "new"), [("1.062<", "1.061<"), ("**21.25**", "**21.26**"), ("1.06 / 1.10", "1.06 / 1.11")]
)
def test_a_changed_digit_in_a_document_is_found(root, old, new):
    replace(root / "README.md", old, new)
    assert only_problem(root).startswith("README.md: line ")
    assert new.strip("<*") in only_problem(root)


def test_a_changed_row_in_a_results_file_is_found(root):
    path = Published(root / "results").path_of("a")
    replace(path, "21.25", "21.5")
    assert only_problem(root).startswith(f"results/quality/{path.name}: `sha256` is not that of the rest")
    record = json.loads(path.read_text())
    record["sha256"] = run_record.seal(record)
    path.write_text(run_record.text_of(record))
    assert "`demo` says" in only_problem(root)  # sealed anew, it no longer says what the document says


def test_a_row_that_is_not_published_is_protected_too(root):
    path = Published(root / "results").path_of("a")
    record = run_record.load(path)
    other = record | {"run_id": "20260101T000000-abcdef"}
    found = run_record.write(other, root / "results")
    assert problems(root) == []
    replace(found, "33.0", "32.0")
    assert "`sha256`" in only_problem(root)


def test_a_file_that_is_no_record_is_found(root):
    (root / "results" / "quality" / "best.json").write_text("{}")
    assert only_problem(root).startswith("results/quality/best.json: `schema` must be 1")
    (root / "results" / "quality" / "best.json").unlink()
    (root / "results" / "quality" / "table.md").write_text("")
    assert "is no run record" in only_problem(root)


def test_an_unknown_id_is_found(root):
    replace(root / "README.md", "report:ratio", "report:ration")
    assert only_problem(root).startswith("README.md: `ration` is not published")


def test_a_missing_run_is_found(root):
    change_published(root, lambda values: values["runs"].update(a="20260101T000000-abcdef"))
    assert "runs.a names 20260101T000000-abcdef, of which there is no file" in only_problem(root)


def test_a_run_that_is_not_listed_is_found(root):
    change_published(root, lambda values: values["numbers"]["ratio"].update(run="b"))
    assert "numbers.ratio names the run 'b', which `runs` does not list" in only_problem(root)


@pytest.mark.parametrize("where", [{"method": "none"}, {}])
def test_a_missing_row_and_several_are_found(root, where):
    change_published(root, lambda values: values["numbers"]["ratio"].update(where=where))
    assert f"numbers.ratio finds {0 if where else 4} values instead of one" in only_problem(root)


def test_an_id_that_no_document_uses_is_found(root):
    change_published(root, lambda values: values["numbers"].update(more=values["numbers"]["ratio"]))
    assert only_problem(root) == "published.yaml: no document uses `more`; use it or remove it"


@pytest.mark.parametrize(
    "line",
    ["It takes 0.71 of the time.", "| a | 1,024.5 |", "(0.92)", "1.5x", "<!-- x --> 2.0", "from 3.1 to", "~~~ 0.5"[4:]],
)
def test_a_stray_decimal_is_found(root, line):
    with open(root / "README.md", "a") as file:
        file.write(f"\n{line}\n")
    assert "nothing proves" in only_problem(root)
    assert only_problem(root).startswith(f"README.md:{len((root / 'README.md').read_text().splitlines())}: ")


@pytest.mark.parametrize(
    "line",
    [
        "`rate=0.3` and ``0.4``",
        "torch 2.13.0, Python 3.11, glibc 2.35 or later",
        "Llama-3.1-8B, Apache-2.0",
        "[here](docs/x-0.5.md)",
        "<!-- 0.5 -->",
        "The paper has 1.13. <!-- not measured here: the paper's table -->",
        "```\n0.5\n```",
        "Sentence 1. And 2.",
    ],
)
def test_what_needs_no_proof_may_stand(line):
    assert documents.stray_decimals(line) == []


def test_an_escape_needs_a_reason():
    assert documents.stray_decimals("It has 1.13. <!-- not measured here: -->") == [(1, "1.13")]


def test_the_log_is_exempt(root):
    (root / "docs" / "log").mkdir()
    (root / "docs" / "log" / "2026.md").write_text("It took 0.71 <!-- report:nothing --> of the time.")
    assert problems(root) == []


def test_a_decimal_in_a_title_is_refused(root):
    change_published(root, lambda values: values["tables"]["demo"]["columns"][1].update(title="bytes 0.30"))
    assert "holds 0.30, which nothing proves" in only_problem(root)


def test_markers_in_code_are_text(root):
    with open(root / "README.md", "a") as file:
        file.write("\n`<!-- report:x -->`\n\n```\n<!-- report:y -->\n<!-- /report -->\n```\n")
    assert problems(root) == []


def test_a_marker_without_its_partner_is_found(root):
    with open(root / "README.md", "a") as file:
        file.write("\n<!-- report:ratio -->\n")
    assert "a marker without its partner" in only_problem(root)


def test_a_table_within_a_line_is_refused(root):
    replace(root / "README.md", "<!-- report:ratio -->", "<!-- report:demo -->")
    assert "the markers of `demo` need lines of their own" in only_problem(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values["numbers"]["ratio"].update(fields="x"), "unknown key 'fields'"),
        (lambda values: values["numbers"]["ratio"].update(field="x"), "asks for `x`, and rows have method"),
        (lambda values: values["numbers"]["ratio"].update(format="d"), "cannot show 1.0625 as 'd'"),
        (lambda values: values["numbers"]["ratio"].update(show="best"), "`show` must be one of range"),
        (lambda values: values["tables"]["demo"]["rows"][0].update(cells={"x": "–"}), "`cells` names no column 'x'"),
        (lambda values: values["tables"]["demo"]["rows"][0].update(cells={"both": "1.0"}), "is the text '1.0'"),
        (lambda values: values["figures"]["curve"]["series"][0].update(where={"method": "x"}), "has no point"),
        (lambda values: values["figures"].update(demo=values["figures"]["curve"]), "`demo` is published twice"),
        (lambda values: values.update(table={}), "must be a mapping with runs, numbers, tables, figures"),
    ],
)
def test_what_cannot_be_published_is_said(root, change, message):
    change_published(root, change)
    assert message in only_problem(root)
    before = (root / "README.md").read_bytes()
    with pytest.raises(ReportError, match="^published.yaml"):
        publish(root)
    assert (root / "README.md").read_bytes() == before


def test_a_figure_of_other_data_is_found(root):
    change_published(root, lambda values: values["figures"]["curve"]["y"].update(field="perplexity"))
    assert problems(root) == [f"curve{ending}: shows other data than the results" for ending in (".svg", ".png")]
    (root / "docs" / "figures" / "curve.png").unlink()
    assert "curve.png: is missing" in problems(root)


def test_a_figure_that_was_edited_is_found(root):
    replace(root / "docs" / "figures" / "curve.svg", ">books<", ">Books<")
    assert only_problem(root) == "curve.svg: was changed after it was drawn"


def test_an_axis_begins_where_it_is_told(root):
    def begin(values):
        values["figures"]["curve"]["x"]["start"] = 0

    publish(root)
    before = (root / "docs/figures/curve.svg").read_text()
    change_published(root, begin)
    publish(root)
    after = (root / "docs/figures/curve.svg").read_text()
    assert ">0.00<" in after
    assert ">0.00<" not in before


def test_a_figure_for_dark_pages_has_a_picture_more(root):
    def darken(values):
        values["figures"]["curve"] |= {"dark": True, "width": 6}
        values["figures"]["curve"]["series"][0]["ours"] = True

    change_published(root, darken)
    publish(root)
    assert problems(root) == []
    light, dark = ((root / "docs/figures" / name).read_text() for name in ("curve.svg", "curve-dark.svg"))
    assert "#0d1117" in dark
    assert "#0d1117" not in light
    shown = (root / "docs/more.md").read_text()
    assert '<source media="(prefers-color-scheme: dark)" srcset="figures/curve-dark.svg">' in shown
    replace(root / "docs/figures/curve-dark.svg", ">books<", ">Books<")
    assert only_problem(root) == "curve-dark.svg: was changed after it was drawn"


def test_figures_are_the_same_bytes_every_time(root):
    first = (root / "docs" / "figures" / "curve.svg").read_bytes()
    drawn = figures.drawing(Published(root / "results"), "curve")
    assert figures.pictures(drawn)[".svg"] == first
    assert b"<dc:date>" not in first
    code = f"from evaluation.report.publish import publish; import pathlib; publish(pathlib.Path({str(root)!r}))"
    shutil.rmtree(root / "docs" / "figures")
    subprocess.run([program(), "-c", code], check=True, cwd=ROOT)
    assert (root / "docs" / "figures" / "curve.svg").read_bytes() == first


def test_the_command_writes_and_checks(root):
    def report(*arguments):
        command = [program(), "-m", "scripts.report", "--root", str(root), *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    replace(root / "README.md", "1.062<", "1.061<")
    failed = report("--check")
    assert (failed.returncode, "'1.061'" in failed.stdout) == (1, True)
    assert report().returncode == 0
    assert report("--check").returncode == 0
    replace(root / "README.md", "report:ratio", "report:ration")
    assert report().returncode == 2


def test_a_part_that_was_not_measured_is_a_dash(root):
    selection = {"run": "a", "where": {"method": "dynakv", "dataset": "news"}, "field": "ratio", "each": [{}, "–"]}
    assert Published(root / "results").text(selection, "x") == "1.0625 / –"


def test_values_elsewhere_in_a_record_are_found(root):
    published = Published(root / "results")
    assert published.text({"run": "a", "path": "n.*"}, "x") == "2"
    assert published.text({"run": "a", "path": ["n", "*"]}, "x") == "2"


def test_this_repositorys_documents_say_what_its_results_say():
    assert problems(ROOT) == []
