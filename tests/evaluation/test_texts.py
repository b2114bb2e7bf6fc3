"""Windows to measure on: spread over all documents of a text, none read twice, each with the document that it is of."""

import json

import pytest
import torch
from byte_tokenizer import byte_tokenizer

from evaluation.compare import CompareConfig, compare, markdown
from evaluation.scores import rows_of
from evaluation.tasks.registry import TaskConfig
from evaluation.texts import TextConfig, documents_told, read_texts
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.intervals import LEAST_DOCUMENTS, clusters_of, interval


@pytest.fixture
def written(tmp_path):
    """Write documents, each so many times its own letter; returns the file."""

    def call(*lengths):
        path = tmp_path / "text.jsonl"
        texts = [chr(ord("a") + number) * length for number, length in enumerate(lengths)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    return call


def windows_of_file(path, length, count, **options):
    texts = read_texts([TextConfig(label="t", name=str(path))], byte_tokenizer(), length, count, **options)
    return texts["t"], documents_told(texts)["t"]


def test_windows_are_spread_over_all_documents_and_say_which_they_are_of(written):
    path = written(*[99] * 5)  # and an end each
    windows, told = windows_of_file(path, 50, 5)
    assert told == {"of": [0, 4, 2, 1, 3], "touched": [1] * 5}
    again, _ = windows_of_file(path, 50, 5)
    assert torch.equal(windows.ids_NT, again.ids_NT)
    every, told = windows_of_file(path, 50, 1000)
    assert len(every) == 10, "as many as there are, none twice"
    assert told["of"] == [number // 2 for number in (0, 8, 4, 2, 6, 1, 9, 5, 3, 7)]
    assert windows.ids_NT[:, 0].tolist() == [
        every.ids_NT[told["of"].index(document), 0] for document in (0, 4, 2, 1, 3)
    ]
    assert len({tuple(ids.tolist()) for ids in every.ids_NT}) == 10


@pytest.mark.parametrize("count", [1, 2, 7, 32])
def test_the_first_windows_of_any_number_are_spread_over_all_of_a_text(written, count):
    """As those of a run that is ended are: in each of as many parts there is one, or in the part beside it."""
    windows, told = windows_of_file(written(*[19] * count), 20, count)
    assert sorted(told["of"]) == list(range(count))
    for first in range(1, count + 1):
        parts = {document * first // count for document in told["of"][:first]}
        assert len(parts) > first / 2
    assert len(windows) == count


def test_windows_of_a_texts_first_tokens_may_be_of_one_document_and_say_so(written):
    _, told = windows_of_file(written(199, 199, 199), 20, 4, read=200)
    assert told == {"of": [0] * 4, "touched": [1] * 4}
    _, told = windows_of_file(written(199, 199, 199), 20, 4)
    assert told == {"of": [0, 1, 1, 2], "touched": [1] * 4}


def test_a_window_over_the_end_of_a_document_is_of_the_one_that_most_of_it_is_of_and_says_so(written):
    _, told = windows_of_file(written(29, 9, 80), 40, 3)
    assert told == {"of": [0, 2, 2], "touched": [2, 1, 1]}


def test_texts_none_of_which_is_there_are_named():
    texts = [TextConfig(label=name, name=f"/nowhere/{name}.txt", optional=True) for name in ("a", "b")]
    with pytest.raises(
        UserError, match="is there: /nowhere/a.txt, /nowhere/b.txt; put one .*, or give others as `texts`"
    ):
        read_texts(texts, byte_tokenizer(), 50, 1)


@pytest.fixture
def values(tiny_dir, written):
    return {
        "model": str(tiny_dir),
        "dtype": "float32",
        "texts": [{"label": "t", "name": str(written(*[89] * LEAST_DOCUMENTS))}],
        "methods": [{"peer": "rotated-int2"}],
        "prefix": 24,  # so that some tokens are compressed
        "length": 30,
        "windows": 1000,
    }


def last(values, output):
    output.mkdir(exist_ok=True)
    *_, make_record = compare(build(CompareConfig, values), output)
    return make_record()


def test_no_text_is_calibrated_on_that_nothing_needs(values, tmp_path, capsys):
    unread = {"calibration": {"name": "nowhere.jsonl"}, "anatomy": False, "windows": 1}
    record = last(values | unread, tmp_path / "out")
    assert "calibration" not in {each["role"] for each in record["inputs"]}
    assert "`calibration` is left out: nothing that is measured needs it" in capsys.readouterr().out


def test_an_interval_draws_windows_of_one_document_together(values, tmp_path):
    record = last(values, tmp_path / "out")
    told, row = record["summary"]["documents"]["t"], record["rows"][-1]
    assert row["documents"] == LEAST_DOCUMENTS == len(set(told["of"])) < row["windows"] == len(told["of"])
    kl_N = torch.tensor([each["kl"] for each in record["summary"]["windows"][-1]["windows"]], dtype=torch.float64)
    together, apart = interval(kl_N, cluster_N=clusters_of([told["of"]])), interval(kl_N)
    assert (row["kl_low"], row["kl_high"]) == (max(0, float(together[0])), float(together[1]))
    assert row["kl_high"] != pytest.approx(float(apart[1]), rel=1e-3)
    assert rows_of(record) == record["rows"], "as the documents' tables resample it"
    assert f"## t ({row['windows']} windows of {LEAST_DOCUMENTS} documents" in markdown(record)
    row["kl"] = -1e-9  # of the full cache, by rounding
    assert "-0.0000" not in markdown({**record, "rows": [row]})


def test_other_windows_of_a_text_are_other_cells(values, tmp_path):
    first = last(values | {"read": 89, "windows": 2}, tmp_path / "out")
    spread = last(values | {"windows": 2}, tmp_path / "out")
    assert first["summary"]["documents"]["t"]["of"] == [0, 0]
    assert spread["summary"]["documents"]["t"]["of"] == [0, LEAST_DOCUMENTS - 1]
    cells = {each["run_id"]: each["cells"] for each in spread["summary"]["measured_by"]}
    assert cells == {first["run_id"]: 2, spread["run_id"]: 2}, "both begin with the same window"


@pytest.mark.parametrize(
    ("measured_share", "left_out", "message"),
    [(0.0, 0.0, "which this run measures"), (0.5, 0.2, "this run measures 0.5 of it"), (0.5, 0.5, None)],
)
def test_a_comparison_warns_where_the_calibration_can_have_read_its_text(
    values, tmp_path, recwarn, measured_share, left_out, message
):
    [text] = values["texts"]
    values |= {"texts": [text | {"heldout_share": measured_share}], "windows": 1}
    values |= {"calibration": {"name": [text["name"]], "heldout_share": left_out, "tokens": 64, "length": 32}}
    last(values, tmp_path / "out")
    found = [str(each.message) for each in recwarn if "calibrate" in str(each.message)]
    assert [message in each for each in found] == ([] if message is None else [True])


def test_tasks_say_which_files_they_measure():
    config = build(TaskConfig, {"task": ["ruler", "arc_easy"], "file": "{task}.jsonl", "essay": "novel.txt"})
    assert config.files == {"arc_easy.jsonl", "novel.txt"}
