"""`report.html`: what stands in the page is what the records say, and nothing is fetched."""

import html.parser
import json
import re
import shutil

import pytest

from evaluation.page import curves
from evaluation.page.bars import has_one_budget
from evaluation.page.build import _best, page
from evaluation.page.fronts import colours_of, panel
from evaluation.page.points import BITS, LEARNED, ONLINE, front, points_of, series_of
from evaluation.page.svg import Placed, Scale
from lowrank_kv.utils import run_record
from lowrank_kv.utils.errors import UserError

METHODS = [
    {"preset": "tokenwise-mixed", "rates": [0.2, 0.1]},
    {"preset": "ojakv-joint", "bytes": [0.3, 0.2], "settings": {"cache_dtype": "int4"}},
    {"checkpoint": "somewhere", "label": "learned 0.06"},
    {"peer": "rotated-int4"},
    {"peer": "rotated-int2"},
    {"peer": "snapkv", "bytes": [0.2]},
]
KL = {
    "full": (1.0, 0.0),
    "tokenwise-mixed 0.2": (0.21, 0.004),
    "tokenwise-mixed 0.1": (0.12, 0.01),
    "ojakv-joint cache_dtype=int4 at 0.3": (0.3, 0.009),
    "ojakv-joint cache_dtype=int4 at 0.2": (0.2, 0.02),
    "learned 0.06": (0.08, 0.013),
    "rotated-int4": (0.28, 0.007),
    "rotated-int2": (0.15, 0.4),
    "snapkv at 0.2": (0.2, 0.9),
}


def row(method, dataset, rate, kl):
    bounds = {"kl_low": 0.9 * kl, "kl_high": 1.1 * kl}
    return {
        "method": method,
        "dataset": dataset,
        "rate": rate,
        "kl": kl,
        "perplexity_ratio": 1 + kl,
        "top1": 0.9,
        **bounds,
        "scored": 1023,
    }


@pytest.fixture
def record():
    rows = [row(method, text, *values) for text in ("novels", "news & <reviews>") for method, values in KL.items()]
    return run_record.new_record(
        "quality", config={"model": "tiny", "methods": METHODS}, inputs=[], n={"windows": 2}, rows=rows
    )


class Reader(html.parser.HTMLParser):
    """Tags that are opened and closed, and all that a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.counts = [], [], {}

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.fetched += [value for name, value in attributes if name in ("src", "href") and not value.startswith("#")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(text):
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_a_page_is_whole_and_fetches_nothing(record):
    text = page([record])
    reader = read(text)
    assert reader.fetched == []
    assert "url(" not in text
    assert "@import" not in text
    assert reader.counts["svg"] == 5 + 3  # markers of families; both texts and their mean
    for method, (rate, kl) in KL.items():
        assert method.replace("cache_dtype=", "") in text
        assert f"{rate:.3f}" in text
        assert f"{kl:.4f}" in text
    assert "news &amp; &lt;reviews&gt;" in text
    assert "<reviews>" not in text
    assert "prefers-color-scheme: dark" in text


LABELS = ("static-mixed 0.1", "rotated-int2", "x at the bytes of learned 0.06", "x at the bytes of rotated-int4")


def test_families_and_series_follow_from_the_configuration(record):
    points = {point.label: point for point in points_of([record])}
    assert points["tokenwise-mixed 0.1"].family == BITS
    assert points["ojakv-joint int4 at 0.2"].family == ONLINE
    assert points["learned 0.06"].family == LEARNED
    assert points["ojakv-joint int4 at 0.2"].series == "ojakv-joint int4"
    assert [series_of(label) for label in LABELS] == ["static-mixed", "rotated-int*", "x", "x"]


def test_the_front_is_what_nothing_beats(record):
    points = [point for point in points_of([record]) if point.dataset == "novels"]
    assert [point.label for point in front(points)] == ["learned 0.06", "tokenwise-mixed 0.1", "tokenwise-mixed 0.2"]
    drawn, beyond = panel(points, colours_of(points), field="kl", y_label="KL")
    assert [each.split(" (")[0] for each in beyond] == ["rotated-int2", "snapkv at 0.2"]  # of too much divergence
    assert drawn.count("beyond") == 2
    assert "on the front: learned 0.06, tokenwise-mixed 0.1" in drawn
    for point in points:
        if point.label not in ("full", "rotated-int2", "snapkv at 0.2"):
            assert f"{point.label}: {point.rate:.3f} of the bytes" in drawn


def test_one_budget_is_drawn_as_bars(record):
    once = [
        each for each in record["rows"] if each["method"] in ("full", "learned 0.06", "rotated-int4", "snapkv at 0.2")
    ]
    assert has_one_budget(points_of([record | {"rows": once}])[:4])
    text = page([record | {"rows": once}])
    assert 'class="bar' in text
    assert "polyline points" in text  # intervals
    assert "learned 0.06, 8%" in text


def test_scores_of_tasks_stand_in_a_table_of_their_own(record):
    rows = [
        {
            "method": "full",
            "dataset": "niah",
            "rate": 1.0,
            "score": 90.0,
            "items": 20,
            "of_full": 100.0,
            "metric": "match",
        },
        {
            **{"method": "learned 0.06", "dataset": "niah", "rate": 0.08, "score": 81.0, "items": 20, "of_full": 90.0},
            **{"difference": -9.0, "difference_low": -17.5, "difference_high": -2.5, "metric": "match"},
        },
        {"method": "full", "dataset": "vt", "rate": 1.0, "score": 0.0, "items": 20, "of_full": None, "metric": "match"},
    ]
    # A group's items are those of its tasks, and do not count twice.
    rows.append(rows[1] | {"dataset": "all", "rate": 0.5, "of_full": 10.0, "tasks": 2})
    text = page([record, record | {"rows": rows}])
    read(text)
    table = text[text.index('id="tasks"') :]
    assert "81.0" in table
    assert "−17.5 to −2.5" in table
    assert '<td data-value="0.08">0.080</td>\n<td data-value="90.0">90</td>' in table
    assert table.count('<td data-value="-1">–</td>') == 2  # not measured
    assert "niah: match, 20 items" in table
    assert 'id="fronts"' not in page([record | {"rows": rows}])


def test_labels_do_not_lie_on_one_another():
    room = Placed(0, 0, 400, 300)
    first, second = (room.label(100, 100, "one method", "c0") for _ in range(2))
    assert first != second
    assert [bool(room.label(100, 100, "a label that is far too long for the panel " * 3, "c0"))] == [False]


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 0.03, [0, 0.01, 0.02, 0.03]), (3, 27, [5, 10, 15, 20, 25])],
)
def test_ticks_are_round(low, high, wanted):
    assert Scale(low=low, high=high, start=0, end=1).ticks() == pytest.approx(wanted)


def test_the_command_shows_several_records_and_refuses_others(record, run, mistake, tmp_path):
    first = run_record.write(record, tmp_path)
    later = run_record.new_record(
        "quality",
        config={"model": "tiny"},
        inputs=[],
        n={"windows": 2},
        rows=[row("learned 0.06", "novels", 0.08, 0.0777)],
    )
    second = run_record.write(later, tmp_path)
    run("report", first, second, "--output", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "0.0777" in text
    assert record["run_id"] in text
    assert later["run_id"] in text
    other = run_record.write(
        run_record.new_record("speed", config={}, inputs=[], n={"repeats": 1}, rows=[{"ms": 1}]), tmp_path
    )
    assert "none of the records compares methods" in mistake("report", other, "--output", tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


def test_compare_writes_its_page(run, tiny_dir, checkpoint, text_file, tmp_path):
    values = {
        "model": str(tiny_dir),
        "dtype": "float32",
        "calibration": {"name": [str(text_file)], "tokens": 480, "length": 160},
        "texts": [{"label": "same", "name": str(text_file)}],
        "methods": [
            {"checkpoint": str(checkpoint), "label": "learned"},
            {"preset": "ojakv-joint", "rates": [0.5], "settings": {"update_period": 8}},
            {"preset": "tokenwise-mixed", "rates": [0.3]},
        ],
        "prefix": 64,
        "length": 128,
        "windows": 2,
    }
    path = tmp_path / "compare.yaml"
    path.write_text(json.dumps(values))
    done = run("compare", "--config", path, "--output", tmp_path / "out")
    assert f"page: {tmp_path / 'out/report.html'}" in done.stdout
    text = (tmp_path / "out/report.html").read_text()
    read(text)
    [written] = (tmp_path / "out/quality").iterdir()
    told = run_record.load(written)["summary"]["anatomy"]
    assert set(told["allocations"]["methods"]) == {"learned", "ojakv-joint update_period=8 0.5", "tokenwise-mixed 0.3"}
    assert list(told["residuals"]) == ["ojakv-joint update_period=8 0.5"]
    assert "learned" in told["sentence"]["methods"]
    for section in ("tokens", "spectra", "allocation", "residuals"):
        assert f'id="{section}"' in text
    assert len(re.findall('class="(yes|no)"', text)) >= 2


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_the_page_parses(record, tmp_path):
    import subprocess

    script = re.search(r"<script>(.*)</script>", page([record]), re.S).group(1)
    (tmp_path / "page.js").write_text(script)
    subprocess.run(["node", "--check", tmp_path / "page.js"], check=True)


@pytest.mark.parametrize(
    "residuals",
    [
        {"position": [1024], "keys": [0.1], "key_starts": [0.1], "updates": [0]},
        {"position": [64, 80], "keys": [0.0, 0.0], "key_starts": [0.0, 0.0], "updates": [0, 0]},
    ],
    ids=["one position", "nothing lost"],
)
def test_figures_of_one_point_or_of_zeros_are_drawn(residuals):
    assert curves.residual({"m": residuals}, "keys", {"m": "c0"}).startswith("<svg")
    allocations = {"layers": [0], "methods": {"a": {"keys": [0.3], "values": [0.3]}}}
    assert curves.allocation(allocations, "keys", {"a": "c0"}).startswith("<svg")


def test_a_page_of_methods_that_lose_nothing(record):
    for each in record["rows"]:
        each |= {"kl": 0.0, "kl_low": 0.0, "kl_high": 0.0}
    assert "<svg" in page([record])


def test_what_was_measured_otherwise_is_not_shown_side_by_side(record):
    for key, value in (("model", "other"), ("prefix", 7)):
        before = {**record, "config": {**record["config"], "prefix": 2048}}
        after = {**before, "run_id": "20991231T000000-abcdef", "config": {**before["config"], key: value}}
        with pytest.raises(UserError, match=f"the records differ in `{key}`"):
            page([before, after])


def test_equal_labels_of_other_windows_or_weights_are_not_shown_side_by_side(record):
    def measured(role="weights", name="tiny", sha256="a" * 64, *, windows=2, run_id="20991231T000000-abcdef"):
        inputs = [{"role": role, "name": name, "sha256": sha256, "run_id": None}]
        rows = [each | {"windows": windows} for each in record["rows"]]
        return {**record, "run_id": run_id, "inputs": inputs, "rows": rows}

    of_text = {"role": "text", "name": "novels", "run_id": "20991230T000000-abcdef"}
    page([measured(), measured(run_id="20991230T000000-abcdef")])
    page([measured("text", "novels"), measured(**of_text)])
    with pytest.raises(UserError, match="the records differ in the model's weights .'a+' in 2099"):
        page([measured(), measured(sha256="b" * 64, run_id="20991230T000000-abcdef")])
    with pytest.raises(UserError, match="the records differ in the windows of `novels`"):
        page([measured("text", "novels"), measured(sha256="b" * 64, **of_text)])
    with pytest.raises(UserError, match="the records differ in the windows of `novels`"):
        page([measured("text", "novels"), measured(windows=1, **of_text)])


def test_equal_tasks_of_other_items_are_not_shown_side_by_side(record):
    def measured(run_id, items=20, **settings):
        rows = [{"method": "full", "dataset": "piqa", "rate": 1.0, "score": 50.0, "items": items, "of_full": 100.0}]
        tasks = [{"task": ["piqa"], "shots": 3, "items": None, **settings}]
        return {**record, "run_id": run_id, "config": {"model": "tiny", "tasks": tasks}, "rows": rows}

    first = measured("20991231T000000-abcdef")
    page([first, measured("20991230T000000-abcdef")])
    # What this task does not read, and a key that the other record's version had not.
    page([first, measured("20991230T000000-abcdef", edges=None, facts=40, file="elsewhere/piqa.jsonl")])
    for changed in ({"items": 4}, {"shots": 1}):
        with pytest.raises(UserError, match="the records differ in the items of `piqa"):
            page([first, measured("20991230T000000-abcdef", **changed)])


def test_a_task_s_files_of_one_name_that_hold_other_items_are_not_shown_side_by_side(record):
    def measured(run_id, sha256):
        rows = [{"method": "full", "dataset": "piqa", "rate": 1.0, "score": 50.0, "items": 20, "of_full": 100.0}]
        tasks = [{"task": ["piqa"], "shots": 3, "items": None, "file": "piqa.jsonl"}]
        entry = {"role": "task", "name": "piqa.jsonl", "sha256": sha256, "run_id": None}
        config = {"model": "tiny", "tasks": tasks}
        return {**record, "run_id": run_id, "config": config, "rows": rows, "inputs": [*record["inputs"], entry]}

    first = measured("20991231T000000-abcdef", 64 * "a")
    page([first, measured("20991230T000000-abcdef", 64 * "a")])
    with pytest.raises(UserError, match=r"the records differ in the file `piqa\.jsonl`"):
        page([first, measured("20991230T000000-abcdef", 64 * "b")])


def test_one_task_is_shown_with_and_without_its_question_and_under_any_name_of_a_row(record):
    def measured(*tasks, run_id="20991231T000000-abcdef"):
        rows = [{"method": "full", "dataset": "niah", "rate": 1.0, "score": 50.0, "items": 20, "of_full": 100.0}]
        return {**record, "run_id": run_id, "config": {"model": "tiny", "tasks": tasks}, "rows": rows}

    agnostic = {"task": ["niah_single_1"], "length": [1024, 2048], "seed": 42, "query": None, "together": "ruler"}
    aware = {**agnostic, "query": "aware", "seed": 7, "together": None}
    alike = {**agnostic, "task": ["ruler"], "query": "agnostic", "length": [2048], "together": None}
    page([measured(agnostic, aware), measured(alike, run_id="20991230T000000-abcdef")])
    with pytest.raises(UserError, match="the items of `niah_single_1`, 2048 tokens, agnostic"):
        page([measured(agnostic, aware), measured({**alike, "seed": 7}, run_id="20991230T000000-abcdef")])


def test_records_without_a_configuration_are_shown_or_refused(record):
    assert "learned" in page([{**record, "config": None}])
    with pytest.raises(UserError, match="none of the records compares methods"):
        page([{**record, "config": None, "rows": [{"ms": 1}]}])


def test_what_is_within_a_budget_takes_no_byte_more(record):
    for each in record["rows"]:
        if each["method"] == "tokenwise-mixed 0.1":
            each["rate"] = 0.104
    assert [(each["budget"], each["label"]) for each in _best(points_of([record]))] == [
        (0.3, "tokenwise-mixed 0.2"),
        (0.2, "tokenwise-mixed 0.1"),
        (0.1, "learned 0.06"),
    ]


def test_means_are_of_methods_that_all_texts_have(record):
    """The mean over the easier half of the texts would stand on top."""
    record["rows"] = [
        each for each in record["rows"] if (each["method"], each["dataset"]) != ("rotated-int4", "novels")
    ]
    shown = page([record])
    [row] = re.findall(r'<tr[^>]*>\s*<td title="rotated-int4">.*?</tr>', shown, re.S)
    assert re.findall(r'data-value="([^"]+)">([^<]+)', row)[1:4] == [("Infinity", "–")] * 3
    others = [each for each in record["rows"] if each["dataset"] == "novels"]
    record["rows"] = [each | {"method": each["method"] + " b", "dataset": "news"} for each in others] + others
    assert "least KL" not in page([record]), "no method has both"


def test_a_page_says_of_how_many_documents_a_text_is(record):
    for each in record["rows"]:
        each["documents"] = 2 if each["dataset"] == "novels" else 1
    shown = " ".join(page([record]).split())
    assert "novels (1,023 scored tokens of 2 documents)" in shown
    assert "(1,023 scored tokens of 1 document)" in shown
