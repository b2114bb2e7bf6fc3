"""`lowrank-kv compare` on a tiny model: every kind of method, at every kind of budget, started again, and its mistakes."""

import contextlib
import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from dynakv.training_config import TrainConfig
from evaluation import side_by_side, window_cells
from evaluation.cells import CELLS
from evaluation.compare import CompareConfig, compare
from evaluation.methods import MethodConfig, methods_of
from evaluation.shared_prompt import read_prompt_once
from evaluation.side_by_side import read_side_by_side
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.loading import load_model
from lowrank_kv.utils import run_record
from lowrank_kv.utils.config import build, parse_config
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.provenance import environment

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def bases(tiny_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("calibrated") / "bases"
    ids = torch.randint(1, 257, (3, 160), generator=torch.Generator().manual_seed(0))
    calibration = Calibration.from_text(load_model(str(tiny_dir)), ids, read_gradients=True, progress=False)
    calibration.save(directory, model="tiny", text=["random"])
    return directory


@pytest.fixture
def values(tiny_dir, checkpoint, bases, text_file, tmp_path):
    """The configuration of a small comparison, as a YAML file holds it."""
    text = tmp_path / "other.txt"
    text.write_text("another kind of text, read only to be measured on. " * 40)
    return {
        "model": str(tiny_dir),
        "dtype": "float32",
        "bases": str(bases),
        "texts": [
            {"label": "same", "name": str(text_file)},
            {"label": "other", "name": str(text)},
            {"label": "missing", "name": str(tmp_path / "missing.txt"), "optional": True},
        ],
        "methods": [{"checkpoint": str(checkpoint)}, {"preset": "static-mixed", "rates": [0.3]}],
        "prefix": 64,
        "length": 100,
        "windows": 2,
    }


@pytest.fixture
def written(values, tmp_path):
    """Write the configuration with some of its values changed; returns the file."""

    def call(**changed):
        path = tmp_path / "compare.yaml"
        path.write_text(yaml.safe_dump(values | changed))
        return path

    return call


def last(values, output):
    """The record of a comparison when it is done."""
    output.mkdir(exist_ok=True)
    *_, make_record = compare(build(CompareConfig, values), output)
    return make_record()


def by_method(record, dataset="same"):
    return {row["method"]: row for row in record["rows"] if row["dataset"] == dataset}


def test_the_command_writes_a_record_and_a_table(run, written, tmp_path):
    done = run("compare", "--config", written(), "--output", tmp_path / "out")
    assert "leaving out `missing`" in done.stdout
    assert " 12/12 " in done.stderr, "three methods on two windows of two texts, each counted once"
    [path] = (tmp_path / "out/quality").iterdir()
    assert f"record: {path}" in done.stdout
    record = run_record.load(path)
    assert record["n"] == {"windows": 4, "tokens": 400}
    assert [each["role"] for each in record["inputs"]] == ["bases", "checkpoint", "model", "weights", "text", "text"]
    for dataset in ("same", "other"):
        rows = by_method(record, dataset)
        assert list(rows) == ["full", "dynakv", "static-mixed 0.3"]
        assert rows["full"]["kl"] == pytest.approx(0, abs=1e-5)
        assert rows["full"]["rate"] == 1
        for row in rows.values():
            assert row["windows"] == 2
            assert row["scored"] == 2 * 35
            assert row["rate"] == row["cache_bytes"] / row["full_bytes"]
            assert row["kl_low"] <= row["kl"] <= row["kl_high"]
            assert f"| {row['method']} | {row['rate']:.3f} |" in done.stdout
    [by] = record["summary"]["measured_by"]
    assert by["run_id"] == record["run_id"]
    assert by["cells"] == 2 * 2 * 3


def test_a_comparison_goes_on_where_it_stopped_and_measures_what_is_new(values, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    stopped = list(itertools.islice(compare(build(CompareConfig, values), output), 3))[-1]()
    lines = (output / CELLS).read_text().splitlines()
    assert len(lines) == 3 * 3  # windows by turns: both of the first text, one of the second
    of = json.loads(lines[0])["of"]
    assert list(of)[:7] == ["model", "weights", "dtype", "bases", "prefix", "step", "window"]
    assert (of["prefix"], of["step"]) == (64, 16)
    assert stopped["n"] == {"windows": 3, "tokens": 300}
    record = last(values | {"methods": [*values["methods"], {"peer": "rotated-int4"}]}, output)
    assert (output / CELLS).read_text().splitlines()[: len(lines)] == lines
    cells = {each["run_id"]: each["cells"] for each in record["summary"]["measured_by"]}
    assert cells == {stopped["run_id"]: 3 * 3, record["run_id"]: 4 * 4 - 3 * 3}
    assert by_method(record)["dynakv"] == by_method(stopped)["dynakv"]
    again = last(values, output)
    assert again["rows"] == [row for row in record["rows"] if row["method"] != "rotated-int4"]
    changed = last(values | {"step": 5}, output)
    assert [each["run_id"] for each in changed["summary"]["measured_by"]] == [changed["run_id"]]


def test_a_comparison_that_goes_on_elsewhere_names_what_measured_its_cells(values, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(run_record, "environment", lambda device: environment(device) | {"vector": "another"})
        earlier.setattr(run_record, "code_state", lambda: {"commit": "a" * 40, "dirty": True, "version": "1"})
        last(values | {"windows": 1}, tmp_path / "out")
    record = last(values | {"windows": 1}, tmp_path / "out")
    [by] = record["summary"]["measured_by"]
    cpu, vector = (record["environment"][name] for name in ("cpu", "vector"))
    assert (by["processor"], by["dirty"], by["commit"]) == (f"{cpu}, another", vector != "another", "a" * 40)
    assert "6 of them by run" in (told := capsys.readouterr().out)
    assert f"with uncommitted code on {cpu}, another, torch" in told


def test_with_other_bases_only_what_is_made_of_them_is_measured_again(values, tmp_path):
    values["methods"].append({"peer": "rotated-int4"})
    output = tmp_path / "out"
    last(values, output)
    before = len((output / CELLS).read_text().splitlines())
    ids = torch.randint(1, 257, (3, 160), generator=torch.Generator().manual_seed(1))
    model = load_model(values["model"])
    Calibration.from_text(model, ids, read_gradients=True, progress=False).save(
        tmp_path / "new", model="tiny", text=["random"]
    )
    last(values | {"bases": str(tmp_path / "new")}, output)
    added = [json.loads(line)["of"] for line in (output / CELLS).read_text().splitlines()[before:]]
    assert len(added) == before // 4  # of the full cache, the checkpoint, the preset and the peer
    assert {each.get("preset") for each in added} == {"static-mixed"}


def test_another_model_of_the_same_configuration_is_measured_by_itself(values, tiny_dir, tmp_path):
    other = tmp_path / tiny_dir.name
    shutil.copytree(tiny_dir, other)
    values |= {"methods": [{"peer": "rotated-int4"}], "texts": values["texts"][:1]}
    values |= {"bases": None, "model": str(other)}
    first = last(values, tmp_path / "out")
    model = load_model(str(other))
    model.get_input_embeddings().weight.data.mul_(1.1)
    model.save_pretrained(other)
    second = last(values, tmp_path / "out")
    assert [each["run_id"] for each in second["summary"]["measured_by"]] == [second["run_id"]]
    assert by_method(second)["rotated-int4"]["perplexity"] != by_method(first)["rotated-int4"]["perplexity"]


def test_cells_that_do_not_say_which_weights_they_are_of_are_measured_again(values, tmp_path):
    values |= {"methods": [{"peer": "rotated-int4"}], "texts": values["texts"][:1], "bases": None}
    last(values, tmp_path / "out")
    path = tmp_path / "out" / CELLS
    cells = [json.loads(line) for line in path.read_text().splitlines()]
    for each in cells:
        del each["of"]["weights"]
    path.write_text("".join(json.dumps(each) + "\n" for each in cells))
    again = last(values, tmp_path / "out")
    assert [each["run_id"] for each in again["summary"]["measured_by"]] == [again["run_id"]]
    assert len(path.read_text().splitlines()) == 2 * len(cells)


def test_presets_meet_a_share_of_bytes_and_the_bytes_of_a_checkpoint(values, checkpoint, tmp_path):
    methods = [
        {"checkpoint": str(checkpoint), "label": "learned"},
        {"preset": "ojakv-joint", "bytes": [0.8, 0.95], "bytes_of": "learned"},
        {"preset": "subspace-a", "bytes": [0.9]},
        {"peer": "snapkv", "bytes": [0.8]},
    ]
    sizes = {"prefix": 240, "length": 320, "windows": 1}
    rows = by_method(last(values | sizes | {"methods": methods, "texts": values["texts"][:1]}, tmp_path / "out"))
    assert rows["ojakv-joint at 0.8"]["rate"] == pytest.approx(0.8, abs=0.06)
    assert rows["ojakv-joint at 0.95"]["rate"] == pytest.approx(0.95, abs=0.06)
    assert rows["subspace-a at 0.9"]["rate"] == pytest.approx(0.9, abs=0.06)
    assert rows["snapkv at 0.8"]["rate"] == pytest.approx(0.8, abs=0.1)
    taken = rows["ojakv-joint at the bytes of learned"]["rate"]
    assert taken == pytest.approx(rows["learned"]["rate"], abs=0.06)


def test_settings_change_a_method_and_its_name(values, checkpoint, tmp_path):
    methods = [
        {"checkpoint": str(checkpoint), "settings": {"cache_dtype": "int8"}},
        {"checkpoint": str(checkpoint), "label": "learned"},
        {"preset": "ojakv-joint", "rates": [0.5], "settings": {"cache_dtype": "int4", "update_period": 8}},
        {"preset": "ojakv-joint", "rates": [0.5]},
        {"peer": "quanto-int4"},
        {"peer": "hqq-int4"},
    ]
    sizes = {"prefix": 240, "length": 320, "windows": 1}
    rows = by_method(last(values | sizes | {"methods": methods, "texts": values["texts"][:1]}, tmp_path / "out"))
    # fp32 numbers of 4 bytes become 1; scales and places are left.
    assert rows["dynakv cache_dtype=int8"]["rate"] < 0.5 * rows["learned"]["rate"]
    assert rows["ojakv-joint cache_dtype=int4 update_period=8 0.5"]["rate"] < rows["ojakv-joint 0.5"]["rate"]
    # 4 bits and two scales a group, and up to 128 tokens in fp32.
    for peer in ("quanto-int4", "hqq-int4"):
        assert (4 + 1) / 32 < rows[peer]["rate"] < (4 + 2) / 32 + 128 / 320


def test_in_one_pass_every_token_but_the_first_is_scored(values, checkpoint, tmp_path):
    methods = [{"checkpoint": str(checkpoint)}, {"preset": "static-pca-joint", "bytes_of": "dynakv"}]
    rows = by_method(last(values | {"methods": methods, "prefix": 0}, tmp_path / "out"))
    assert {row["scored"] for row in rows.values()} == {2 * 99}
    taken = rows["static-pca-joint at the bytes of dynakv"]["cache_bytes"]
    assert taken == pytest.approx(rows["dynakv"]["cache_bytes"], rel=0.05)


def test_an_optional_checkpoint_that_is_not_there_is_left_out(values, tmp_path, capsys):
    missing = {"checkpoint": "nowhere", "label": "trained", "optional": True}
    rows = by_method(last(values | {"methods": [*values["methods"], missing]}, tmp_path / "out"))
    assert list(rows) == ["full", "dynakv", "static-mixed 0.3"]
    assert "leaving out `trained`: nowhere is not there" in capsys.readouterr().out
    with pytest.raises(UserError, match="none of the checkpoints is there: nowhere; train one"):
        last(values | {"methods": [missing]}, tmp_path / "other")
    build(
        CompareConfig, values | {"methods": [values["methods"][0], missing], "prefix": 0}
    )  # it is not read to be checked


def test_methods_that_read_a_prompt_exactly_read_it_together_and_score_as_alone(values, tmp_path, monkeypatch):
    values["methods"] = [*values["methods"], {"preset": "ojakv-pf", "rates": [0.5]}, {"peer": "kivi-int4"}]
    read = []

    def recorded(model, ids, caches):
        read.append(len(caches))
        return read_prompt_once(model, ids, caches)

    def one_by_one(model, ids, caches, **reading):
        return torch.cat([read_side_by_side(model, ids, [cache], **reading) for cache in caches])

    monkeypatch.setattr(window_cells, "_CACHES_AT_ONCE", 3)
    monkeypatch.setattr(window_cells, "read_prompt_once", recorded)
    near = last(values, tmp_path / "near")["rows"]
    # Products of more rows, and of rebuilt states, may be added up in another order; with those of one cache at a time, as
    # decoding attends them, nothing differs.
    monkeypatch.setattr(window_cells, "read_side_by_side", one_by_one)
    monkeypatch.setattr(side_by_side, "rebuilt_once", lambda caches: contextlib.nullcontext())
    read.clear()
    together = last(values, tmp_path / "together")["rows"]
    assert read == [3, 1] * 4  # two texts of two windows; the compressor attends to what it rebuilds of a prompt
    monkeypatch.setattr(window_cells, "can_share", lambda model: False)
    assert last(values, tmp_path / "alone")["rows"] == together
    for row, expected in zip(near, together, strict=True):
        numbers = {key: value for key, value in expected.items() if isinstance(value, float)}
        assert {key: row[key] for key in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-5)
        assert {**row, **numbers} == expected
    assert len(read) == 8


def test_a_fraction_measures_fewer_windows(values, tmp_path):
    assert last(values | {"windows": 4, "fraction": 0.5, "read": 600}, tmp_path / "out")["n"]["windows"] == 2 * 2


def test_a_comparison_that_ends_early_leaves_what_it_measured(mistake, written, values, tmp_path):
    methods = [*values["methods"], {"preset": "static-pca-joint", "bytes": [0.001]}]
    command = ("compare", "--config", written(methods=methods), "--output", tmp_path / "out")
    assert "no rate brings this cache to 0.001" in mistake(*command)
    # The compressor reads a prompt alone; the others are to read it together with the one that cannot be.
    assert len((tmp_path / "out" / CELLS).read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"length": 600}, "`length` is 600 tokens, but this model has 512"),
        ({"methods": [{"checkpoint": "nowhere"}]}, "no DynaKV checkpoint"),
        ({"methods": [{"preset": "magic", "rates": [0.3]}]}, r"`methods\[0\].preset` must be .*; got 'magic'"),
        (
            {"methods": [{"preset": "ojakv-jiont", "rates": [0.3]}]},
            r"must be a preset that there is \(did you mean `ojakv-joint`\?\); got 'ojakv-jiont'",
        ),
        (
            {"methods": [{"preset": "static-joint-pf", "bytes": [0.01]}]},
            "`static-joint-pf at 0.01`: no rate brings this cache to 0.010",
        ),
        ({"methods": [{"peer": "int5"}]}, r"`methods\[0\].peer` must be .*; got 'int5'"),
        ({"methods": [{"preset": "ojakv"}]}, r"`methods\[0\].rates` must be given of `ojakv`, or `bytes`"),
        (
            {"methods": [{"peer": "rotated-int4", "bytes": [0.3]}]},
            "`methods.* must be left out where the method has bytes",
        ),
        ({"methods": [{"preset": "ojakv", "peer": "snapkv", "bytes": [0.3]}]}, "must be given alone"),
        ({"methods": [{"preset": "ojakv", "rates": [1.2]}]}, r"must be numbers in \(0, 1\]"),
        ({"methods": [{"preset": "ojakv", "rates": [0.3], "settings": {"lr": 1}}]}, "unknown key `.*lr`"),
        (
            {"methods": [{"preset": "static-joint-pf", "bytes": [0.9], "settings": {"rate": 0.2}}]},
            "`.*settings.rate` must be left out",
        ),
        ({"methods": [{"preset": "ojakv-pf", "rates": [0.3]}], "prefix": 0}, "`methods` must be without exact prompts"),
        ({"methods": [{"peer": "quanto-int4"}], "prefix": 0}, "`methods` must be without exact prompts"),
        ({"methods": [{"peer": "snapkv"}]}, r"`methods\[0\].bytes` must be given of `snapkv`, or `bytes_of`"),
        ({"methods": [{"preset": "ojakv", "bytes_of": "x"}]}, "`bytes_of` must be a method's label; got 'x'"),
        ({"methods": [{"preset": "ojakv", "rates": [0.3]}] * 2}, "two methods are called `ojakv 0.3`"),
        ({"methods": []}, "`methods` must be at least one"),
        ({"methods": [{"peer": "rotated-int4", "optional": True}]}, "`methods.*optional` must be left out without a"),
        ({"texts": [{"label": "a", "name": "a.txt"}] * 2}, "`texts` must be of different labels"),
        ({"bases": None}, "`bases` must be given where there are presets"),
        ({"bases": "nowhere"}, "`nowhere` is no calibration"),
        ({"prefix": 99}, "`prefix` must be below `length` by two"),
        ({"read": 10}, "`read` must be at least `length`"),
        ({"fraction": 0}, r"`fraction` must be in \(0, 1\]"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_remedy(values, tmp_path, changed, message):
    with pytest.raises(UserError, match=message):
        last(values | changed, tmp_path / "out")


def test_a_mistake_ends_in_one_paragraph(mistake, written, tmp_path):
    command = ("compare", "--config", written(dtype="float8"), "--output", tmp_path / "out")
    assert "`dtype` must be one of" in mistake(*command)


def test_ranks_by_energy_have_no_budget(model, calibration):
    settings = {"ranks": "energy", "energy": 0.9}
    with pytest.raises(UserError, match="`rates` must be left out with `ranks: energy`"):
        MethodConfig(preset="static-joint-pf", rates=[0.2, 0.8], settings=settings)
    with pytest.raises(UserError, match="`bytes` must be left out where the method has bytes of its own"):
        MethodConfig(preset="static-joint-pf", bytes=[0.5], settings=settings)
    config = MethodConfig(preset="static-joint-pf", settings=settings)
    _, method = methods_of([config], model, calibration)
    assert method.label == "static-joint-pf ranks=energy energy=0.9"
    assert method.make(None)().get_seq_length() == 0


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("compare-*.yaml")), ids=lambda path: path.stem)
def test_our_comparisons_are_valid(path, monkeypatch):
    monkeypatch.setenv("LOWRANK_KV_HOME", "home")
    config, _ = parse_config(CompareConfig, ["--config", str(path)], description="")
    labels = [method.name for method in config.methods if not method.rates and not method.bytes]
    assert len(set(labels)) == len(labels)


def test_trained_peers_learn_from_what_the_plans_that_they_are_compared_with_learn_from(monkeypatch):
    monkeypatch.setenv("LOWRANK_KV_HOME", "home")

    def recipe(name: str, *arguments: str) -> TrainConfig:
        return parse_config(TrainConfig, ["--config", str(CONFIGS / f"{name}.yaml"), *arguments], description="")[0]

    def tokens(config: TrainConfig) -> int:
        return config.optimizer.steps * config.optimizer.batch_size * config.dataset.sequence_length

    plan = recipe("smollm2-plan", "--optimizer.steps", "100")
    for name in ("matryoshka-mixed", "star-kv"):
        peer = recipe(name)
        assert dataclasses.replace(peer.dataset, sequence_length=1024) == plan.dataset
        assert (peer.model, peer.dtype, peer.calibration.bases) == (plan.model, plan.dtype, plan.calibration.bases)
        assert tokens(peer) == tokens(plan)
    mixed, published = recipe("matryoshka-mixed"), recipe("matryoshka")
    for section in ("compressor", "loss", "optimizer"):
        assert getattr(mixed, section) == getattr(published, section)
