"""`lowrank-kv tasks` on a tiny model: every task, both kinds of compression, started again, and its mistakes."""

import itertools
import json

import pytest
import torch
import yaml
from byte_tokenizer import byte_tokenizer
from methods import tiny_model

from evaluation.cells import CELLS
from evaluation.tasks.long_decoding import TEXTS
from evaluation.tasks.lookup import lookup_items
from evaluation.tasks.rows import markdown
from evaluation.tasks.run import TasksConfig, run_tasks
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.loading import load_model
from lowrank_kv.utils import run_record
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError
from ojakv import make_plan


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("positions") / "tiny"
    overrides = {"vocab_size": 257, "max_position_embeddings": 2048, "eos_token_id": 0, "num_hidden_layers": 2}
    tiny_model(**overrides).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def bases(model_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("calibrated") / "bases"
    ids = torch.randint(1, 257, (3, 160), generator=torch.Generator().manual_seed(0))
    Calibration.from_text(load_model(str(model_dir)), ids, read_gradients=True, progress=False).save(
        directory, model="tiny", text=["random"]
    )
    return directory


@pytest.fixture
def files(tmp_path):
    """Files of the published forms."""
    essay = "".join(f"Sentence {i} tells of {i * i} things. " for i in range(60))
    choices = [
        {"goal": f"Question {i}?", "sol1": f"no {i}", "sol2": f"yes, {i * 37}", "label": i % 2} for i in range(12)
    ]
    rows = {
        "essay": [{"text": essay}],
        "piqa": choices,
        "musique": [{"input": "What?", "context": "It is blue. " * 20, "answers": ["blue"], "all_classes": None}] * 2,
        "boxed": [{"problem": f"{i}+1?", "answer": i + 1} for i in range(2)],
        "long": [{"text": "Once upon a time"}],
    }
    for name, each in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    return {name: str(tmp_path / f"{name}.jsonl") for name in rows}


@pytest.fixture
def values(model_dir, bases, files):
    """The configuration of a small run, as a YAML file holds it."""
    return {
        "model": str(model_dir),
        "dtype": "float32",
        "bases": str(bases),
        "methods": [{"peer": "rotated-int4"}, {"preset": "static-joint-pf", "bytes": [0.5]}],
        "tasks": [
            {"task": "lookup", "items": 4, "facts": 3, "questions": 2},
            {"task": "piqa", "file": files["piqa"], "shots": 3, "items": 5},
        ],
    }


def last(values, output):
    """The record of a run when it is done."""
    output.mkdir(exist_ok=True)
    *_, make_record = run_tasks(build(TasksConfig, values), output)
    return make_record()


def by_method(record, dataset):
    return {row["method"]: row for row in record["rows"] if row["dataset"] == dataset}


def cells(output):
    return [json.loads(line) for line in (output / CELLS).read_text().splitlines()]


def test_the_command_writes_a_record_and_tables(run, values, tmp_path):
    path, output = tmp_path / "tasks.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(values))
    done = run("tasks", "--config", path, "--output", output)
    [written] = (output / "quality").iterdir()
    assert f"record: {written}" in done.stdout
    record = run_record.load(written)
    assert record["n"] == {"tasks": 2, "items": 9}
    assert [each["role"] for each in record["inputs"]] == ["bases", "model", "weights", "task"]
    for dataset, items in (("lookup", 4), ("piqa", 5)):
        rows = by_method(record, dataset)
        assert list(rows) == ["full", "rotated-int4", "static-joint-pf at 0.5"]
        assert rows["full"]["rate"] == 1
        assert rows["full"]["difference"] == 0
        for row in rows.values():
            assert row["items"] == items
            assert row["query"] == "agnostic"
            assert row["rate"] == row["cache_bytes"] / row["full_bytes"]
            assert row["score_low"] <= row["score"] <= row["score_high"]
            assert f"| {row['method']} | {row['rate']:.3f} | " in done.stdout
    assert by_method(record, "piqa")["full"].keys() >= {"acc", "acc_low", "acc_norm"}
    assert "## piqa (acc, query-agnostic)" in done.stdout
    [by] = record["summary"]["measured_by"]
    assert by["cells"] == 3 * 9
    assert "left" in done.stderr  # an estimate of the time
    scores = {(each["method"], each["dataset"]): each["scores"] for each in record["summary"]["items"]}
    assert len(scores["rotated-int4", "piqa"]) == 5
    assert 100 * sum(scores["full", "piqa"]) / 5 == by_method(record, "piqa")["full"]["score"]


def test_a_run_goes_on_where_it_stopped_and_answers_what_is_new(values, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    stopped = list(itertools.islice(run_tasks(build(TasksConfig, values), output), 4))[-1]()
    before = cells(output)
    # The first list's two questions by all three methods, then the first choices.
    assert [each["of"]["task"] for each in before] == ["lookup"] * 6 + ["piqa"] * 5
    changed = values | {"methods": [*values["methods"], {"peer": "rotated-int2"}]}
    record = last(changed, output)
    assert cells(output)[: len(before)] == before
    assert len(cells(output)) == 4 * 9
    measured = {each["run_id"]: each["cells"] for each in record["summary"]["measured_by"]}
    assert measured == {stopped["run_id"]: 11, record["run_id"]: 4 * 9 - 11}
    again = last(values, output)
    assert again["rows"] == [row for row in record["rows"] if row["method"] != "rotated-int2"]
    assert len(cells(output)) == 4 * 9


def test_a_fraction_answers_the_first_items_and_the_rest_comes_later(values, tmp_path):
    output = tmp_path / "out"
    first = last(values | {"fraction": 0.5}, output)
    assert first["n"]["items"] == 2 + 2
    before = cells(output)
    assert len(before) == 3 * 4
    record = last(values, output)
    assert len(cells(output)) == 3 * 9
    assert {each["run_id"]: each["cells"] for each in record["summary"]["measured_by"]}[first["run_id"]] == 3 * 4


def test_budgets_are_met_and_a_method_may_take_anothers_bytes(values, tmp_path):
    methods = [
        {"peer": "rotated-int4"},
        {"preset": "static-joint-pf", "bytes_of": "rotated-int4", "settings": {"cache_dtype": "int8"}},
        {"peer": "snapkv", "bytes": [0.6]},
    ]
    tasks = [{"task": "lookup", "items": 4, "facts": 24, "questions": 2}]
    rows = by_method(last(values | {"methods": methods, "tasks": tasks}, tmp_path / "out"), "lookup")
    taken = rows["static-joint-pf cache_dtype=int8 at the bytes of rotated-int4"]["rate"]
    assert taken == pytest.approx(rows["rotated-int4"]["rate"], abs=0.03)
    assert rows["snapkv at 0.6"]["rate"] == pytest.approx(0.6, abs=0.06)


def test_a_plan_of_a_rate_is_made_once_and_a_budget_s_for_each_length(values, tmp_path, monkeypatch):
    made = []

    def noted(*given):
        made.append(given[1].rate)
        return make_plan(*given)

    monkeypatch.setattr("evaluation.methods.make_plan", noted)
    methods = [{"preset": "static-joint-pf", "rates": [0.5], "bytes": [0.6]}, {"preset": "subspace-g", "rates": [0.25]}]
    tasks = [{"task": "lookup", "items": 2, "facts": 3}, {"task": "niah_single_1", "items": 1, "length": [700, 1100]}]
    record = last(values | {"methods": methods, "tasks": tasks}, tmp_path / "out")
    assert sorted(made) == [0.25, 0.5]
    labels = [row["method"] for row in record["rows"] if row["dataset"] == "lookup"]
    assert labels == ["full", "static-joint-pf 0.5", "static-joint-pf at 0.6", "subspace-g 0.25"]
    lengths = {tuple(cell["of"]["text"]) for cell in cells(tmp_path / "out") if "bytes" in cell["of"]}
    assert len(lengths) == 3


@pytest.mark.parametrize(("query", "known"), [("agnostic", 0), ("aware", 1)])
def test_a_budget_is_met_behind_what_is_read_as_a_prompt(values, tmp_path, query, known):
    methods, tasks = [{"peer": "snapkv", "bytes": [0.6]}], [{"task": "lookup", "items": 1, "facts": 3, "query": query}]
    last(values | {"methods": methods, "tasks": tasks}, tmp_path / "out")
    [lengths] = {tuple(cell["of"]["text"]) for cell in cells(tmp_path / "out") if "bytes" in cell["of"]}
    [item] = lookup_items(byte_tokenizer(), count=1, facts=3, questions=1, seed=42)
    assert item.num_asked > 8
    assert lengths[0] == pytest.approx(len(item.context) + known * item.num_asked, abs=32)


@pytest.mark.parametrize("query", ["agnostic", "aware"])
def test_what_a_cache_knows_when_it_compresses(values, files, tmp_path, query):
    """Of an exact prompt that holds the question, the first answered token is the uncompressed model's whatever is kept."""
    tasks = [
        {"task": "musique", "file": files["musique"], "length": 600, "query": query},
        {"task": "piqa", "file": files["piqa"], "shots": 3, "items": 4, "query": query},
        {"task": "lookup", "facts": 8, "items": 6, "query": query},
    ]
    output = tmp_path / "out"
    methods = [{"peer": "streaming-llm", "bytes": [0.2]}]
    record = last(values | {"methods": methods, "tasks": tasks}, output)
    suffix = " aware" if query == "aware" else ""
    assert list(dict.fromkeys(row["dataset"] for row in record["rows"])) == [
        f"musique 600{suffix}",
        f"piqa{suffix}",
        f"lookup{suffix}",
    ]
    answers = {}
    for cell in cells(output):
        assert cell["of"]["query"] == query
        answers.setdefault(cell["of"]["item"], []).append(cell["score"]["answer"])
    firsts = [{text[:1] for text in texts} for texts in answers.values() if "" not in texts]
    assert firsts
    same = [len(each) == 1 for each in firsts]
    assert all(same) if query == "aware" else not all(same)


def test_ruler_s_tasks_run_and_their_prompts_fit(values, files, tmp_path):
    tasks = [
        {
            "task": ["niah_single_1", "niah_single_2", "fwe"],
            "length": [1000, 1200],
            "items": 1,
            "essay": files["essay"],
        },
        {"task": "niah_single_1", "length": 800, "items": 1, "max_new_tokens": 5},
    ]
    record = last(values | {"tasks": tasks, "methods": [{"peer": "rotated-int4"}]}, tmp_path / "out")
    assert list(dict.fromkeys(row["dataset"] for row in record["rows"])) == [
        "niah_single_1 1000",
        "niah_single_1 1200",
        "niah_single_2 1000",
        "niah_single_2 1200",
        "fwe 1000",
        "fwe 1200",
        "niah_single_1 800",
    ]
    short = [cell["score"] for cell in cells(tmp_path / "out") if cell["of"]["task"] == "niah_single_1 800"]
    assert short
    assert max(len(score["answer"]) for score in short) <= 5
    assert [each["role"] for each in record["inputs"]] == ["bases", "model", "weights", "essay"]
    token_bytes = 2 * 2 * 32 * 4  # layers, keys and values, width, fp32
    for row in record["rows"]:
        assert row["full_bytes"] <= int(row["dataset"].split()[1]) * token_bytes


def test_a_record_may_be_written_before_every_task_has_begun(values, files, tmp_path):
    names = ["niah_single_1", "niah_single_2"]
    task = {"task": names, "length": 900, "items": 1, "together": "needles", "essay": files["essay"]}
    (tmp_path / "out").mkdir()
    config = build(TasksConfig, values | {"tasks": [task], "methods": [{"peer": "rotated-int2"}]})
    for answered, make_record in enumerate(run_tasks(config, tmp_path / "out"), 1):
        for _ in range(2):
            rows = [row for row in make_record()["rows"] if row["dataset"] != "needles 900"]
            assert len(rows) == answered
            assert make_record()["n"] == {"tasks": (answered + 1) // 2, "items": (answered + 1) // 2}


def test_a_row_holds_the_mean_of_several_tasks(values, files, tmp_path):
    names = ["niah_single_1", "niah_single_2"]
    task = {"task": names, "length": [900, 1000], "items": 3, "together": "needles", "essay": files["essay"]}
    record = last(values | {"tasks": [task], "methods": [{"peer": "rotated-int2"}]}, tmp_path / "out")
    for length in (900, 1000):
        whole = by_method(record, f"needles {length}")
        assert list(whole) == ["full", "rotated-int2"]
        for method, row in whole.items():
            parts = [by_method(record, f"{name} {length}")[method] for name in names]
            assert (row["items"], row["tasks"]) == (6, 2)
            assert row["score"] == pytest.approx(sum(part["score"] for part in parts) / 2)
            assert row["cache_bytes"] == sum(part["cache_bytes"] for part in parts)
            assert row["score_low"] <= row["score"] <= row["score_high"]
    [heading] = [line for line in markdown(record).splitlines() if line.startswith("| method | bytes | niah_single_1")]
    assert heading.split(" | ")[2:-1] == [f"{name} {length}" for name in names for length in (900, 1000)]
    assert "\n## needles 900 (" in markdown(record)


def test_problems_are_read_with_their_question(values, files, tmp_path):
    tasks = [{"task": "boxed", "file": files["boxed"], "max_new_tokens": 5}]
    settings = {"keep_prompt_full_rank": True}
    methods = [{"preset": "static-joint-pf", "rates": [0.5], "settings": settings}]
    output = tmp_path / "out"
    rows = by_method(last(values | {"tasks": tasks, "methods": methods}, output), "boxed")
    assert {row["query"] for row in rows.values()} == {"aware"}
    assert all(len(cell["score"]["answer"].encode()) > 0 for cell in cells(output))


def test_long_decoding_is_compared_by_position(values, files, tmp_path, monkeypatch):
    tasks = [{"task": "long_decoding", "file": files["long"], "length": 600, "temperature": 1.0}]
    methods = [{"preset": "static-joint-pf", "rates": [0.3]}, {"preset": "static-joint-pf", "rates": [0.9]}]
    output = tmp_path / "out"
    rows = by_method(last(values | {"tasks": tasks, "methods": methods}, output), "long_decoding 600")
    for name in ("kl", "kl 0–512", "kl 512–600"):
        assert rows["full"][name] == pytest.approx(0, abs=1e-6)
        assert 0 < rows["static-joint-pf 0.9"][name] < rows["static-joint-pf 0.3"][name]
    assert rows["full"]["score"] == 100
    assert rows["full"]["top1 512–600"] == 1
    weighted = (512 * rows["static-joint-pf 0.3"]["kl 0–512"] + 88 * rows["static-joint-pf 0.3"]["kl 512–600"]) / 600
    assert rows["static-joint-pf 0.3"]["kl"] == pytest.approx(weighted)
    with pytest.raises(UserError, match="`items` must be at most 1, the rows of "):
        last(values | {"tasks": [tasks[0] | {"items": 7}], "methods": methods}, tmp_path / "more")
    [text] = (output / TEXTS).iterdir()
    written = json.loads(text.read_text())["text"]
    assert len(written) == 600
    assert 0 not in written  # a token that ends a text is never sampled
    # The text is kept: a second start reads it and samples nothing.
    monkeypatch.setattr(torch, "multinomial", None)
    again = by_method(last(values | {"tasks": tasks, "methods": methods}, output), "long_decoding 600")
    assert again == rows
    # Its positions can be divided elsewhere.
    other = by_method(
        last(values | {"tasks": [tasks[0] | {"edges": [12, 88]}], "methods": methods}, output), "long_decoding 600"
    )
    found = other["static-joint-pf 0.3"]
    parts = [size * found[f"kl {part}"] for part, size in (("0–12", 12), ("12–88", 76), ("88–600", 512))]
    assert sum(parts) / 600 == pytest.approx(found["kl"]) == pytest.approx(rows["static-joint-pf 0.3"]["kl"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tasks": []}, "`tasks` must be at least one"),
        ({"tasks": [{"task": "niah"}]}, r"`tasks\[0\].task` must be .*; got 'niah'"),
        ({"tasks": [{"task": "piqa"}]}, "`.*file` must be given for piqa"),
        ({"tasks": [{"task": ["piqa", "hellaswag"], "file": "x.jsonl"}]}, "`.*file` must be a name with `{task}`"),
        ({"tasks": [{"task": "piqa", "file": "x.jsonl"}]}, "cannot read `x.jsonl`"),
        (
            {"tasks": [{"task": "piqa", "file": "x.jsonl", "shots": 0}]},
            "`.*shots` must be at least 1 with `query: agnostic`",
        ),
        (
            {"tasks": [{"task": "piqa", "file": "x.jsonl", "optional": True}]},
            "`tasks` must be at least one that is there",
        ),
        ({"tasks": [{"task": "niah_single_2"}]}, "`.*essay` must be given for niah_single_2"),
        ({"tasks": [{"task": "lookup", "items": 0}]}, "`.*items` must be at least 1"),
        ({"tasks": [{"task": "lookup", "seed": 10**20}]}, "`.*seed` must be at least 0 and below 2³¹"),
        (
            {"tasks": [{"task": "long_decoding", "file": "x", "temperature": 1e-40}]},
            "`.*temperature` must be at least 1e-06 and finite; 0 takes the likeliest tokens",
        ),
        (
            {"tasks": [{"task": "long_decoding", "file": "x", "length": 600, "edges": [500, 600]}]},
            r"`.*edges` must be positions within the shortest text \(600 tokens\), each larger than the one before",
        ),
        (
            {"tasks": [{"task": "lookup", "facts": 2, "questions": 3}]},
            "`questions` must be between 1 and the 2 `facts`",
        ),
        ({"tasks": [{"task": "lookup", "facts": 200_000}]}, "`facts` must be at most 103,776, of which each has a key"),
        ({"tasks": [{"task": "lookup", "facts": 3}] * 2}, "`tasks` must be each listed once"),
        ({"tasks": [{"task": "lookup", "together": "lookup"}]}, "`together` must be another name than a task's"),
        (
            {"tasks": [{"task": "lookup", "together": "x"}, {"task": "lookup", "together": "x", "query": "aware"}]},
            "`together` must be of tasks with one metric and one `query`",
        ),
        ({"tasks": [{"task": "lookup", "facts": 60}]}, "`tasks.lookup` is .* tokens, but this model has 2048"),
        ({"tasks": [{"task": "boxed", "file": "x", "query": "agnostic"}]}, "`.*query` must be `aware` for `boxed`"),
        ({"tasks": [{"task": "lookup", "query": "both"}]}, "`.*query` must be one of agnostic, aware"),
        (
            {"tasks": [{"task": "lookup", "length": [1024]}]},
            r"`.*length` must be left out of lookup, which does not read it; got \[1024\]",
        ),
        (
            {"tasks": [{"task": ["niah_single_1", "niah_multivalue"], "facts": 7}]},
            "`.*facts` must be left out of niah_single_1, niah_multivalue, which do not read it; got 7",
        ),
        ({"methods": [{"peer": "palu-j", "bytes": [0.01]}]}, "`palu-j at 0.01`: `share` 0.01 leaves no byte"),
        ({"fraction": 0}, r"`fraction` must be in \(0, 1\]"),
        ({"methods": []}, "`methods` must be at least one"),
        ({"bases": None}, "`bases` must be given where there are presets"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_remedy(values, tmp_path, changed, message):
    with pytest.raises(UserError, match=message):
        last(values | changed, tmp_path / "out")


def test_a_mistake_ends_in_one_paragraph(mistake, values, tmp_path):
    path = tmp_path / "tasks.yaml"
    path.write_text(yaml.safe_dump(values | {"dtype": "float8"}))
    assert "`dtype` must be one of" in mistake("tasks", "--config", path, "--output", tmp_path / "out")
