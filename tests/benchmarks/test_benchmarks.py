"""Every benchmark as it is called, on a tiny model: it checks what it times, and writes what it says it writes."""

import argparse
import importlib
import platform
import shutil
from pathlib import Path

import pytest
import torch
from methods import calibration_of, dynakv_model, planned_model, tiny_model
from old_transformers import IS_OLDEST
from transformers import DynamicCache

import dynakv
from benchmarks import compare_checkouts, decode_shapes
from benchmarks.caches import lay_out_by_columns
from benchmarks.harness import check_close
from lowrank_kv.hf.cache.windowed.layer import WindowedLayer
from lowrank_kv.utils import provenance, run_record
from lowrank_kv.utils.errors import UserError

ROOT = Path(__file__).parents[2]
CACHES = ["dynamic_cache", "preallocated", "dynakv", "ojakv-pf", "ojakv-joint"]


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """The arguments that name a model's compressor and bases."""
    directory = tmp_path_factory.mktemp("benchmarked")
    model = tiny_model()
    model.save_pretrained(directory / "model")
    calibration_of(model).save(directory / "bases", model="model", text=["random tokens"])
    dynakv_model(model, 0.4)
    dynakv.save_compressor(model, directory / "checkpoint")
    return [
        *("--model", directory / "model", "--checkpoint", directory / "checkpoint", "--bases", directory / "bases"),
        *("--context", 80),
    ]


@pytest.fixture
def rows(capsys, tmp_path):
    """Call a benchmark in this process; returns the rows it writes by method, each of which it also prints."""

    def call(name: str, *arguments: object) -> dict[str, dict]:
        importlib.import_module(f"benchmarks.{name}").main([*map(str, arguments), "--results", str(tmp_path / "out")])
        return read(tmp_path / "out", name, capsys.readouterr().out)

    return call


def read(output: Path, name: str, printed: str) -> dict[str, dict]:
    record = only_record(output)
    assert record["kind"] == ("memory" if name == "memory" else "speed")
    assert record["config"]["benchmark"] == name
    assert record["environment"]["cpu"] not in ("", platform.machine())
    found = {row["method"]: row for row in record["rows"]}
    for text in (*(f"{method}  " for method in found), f"record: {output}"):
        assert text in printed
    return found


def only_record(output: Path) -> dict:
    [path] = output.glob("*/*.json")
    return run_record.load(path)


def test_a_record_says_what_was_timed_and_how_often(rows, caches, tmp_path):
    rows("prefill", *caches, "--repeats", 1)
    record = only_record(tmp_path / "out")
    checkpoint = caches[caches.index("--checkpoint") + 1]
    assert [each["role"] for each in record["inputs"]] == ["checkpoint", "bases", "model"]
    assert record["inputs"][0] == provenance.path_input("checkpoint", checkpoint)
    assert record["inputs"][2]["name"] == "model"
    assert record["n"] == {"repeats": 1, "context": 80}
    assert record["config"]["checkpoint"] == "checkpoint"
    assert record["config"]["matmul_flops"] > 0
    assert "results" not in record["config"]


def test_flash_attends_as_torch_chooses():
    shape = decode_shapes.Shape(2, 6, 2, 16, 70, torch.bfloat16, torch.device("cpu"))
    torch.manual_seed(0)
    step = decode_shapes.flash(shape)
    expected = step.reference()
    assert (step.attend().double() - expected).norm() < 1e-2 * expected.norm()


def test_decoding_end_to_end(rows, caches):
    found = rows("generate_e2e", *caches, "--tokens", 3)
    assert list(found) == CACHES
    for row in found.values():
        assert row["ms_per_token"] > 0
        assert row["bandwidth_fraction"] > 0
        for other, key in (("dynamic_cache", "ratio_to_dynamic_cache"), ("preallocated", "ratio_to_preallocated")):
            assert row[key] == pytest.approx(row["ms_per_token"] / found[other]["ms_per_token"])
    assert found["dynamic_cache"]["rate"] == 1.0
    assert 0.3 < found["dynakv"]["rate"] < 0.7


@pytest.mark.parametrize("kind", ["plan", "gates that read prompts exactly"])
def test_compressors_beside_which_tokens_are_exact(rows, kind, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    planned_model(model, 0.4) if kind == "plan" else dynakv_model(model, 0.4, prefill="exact")
    dynakv.save_compressor(model, tmp_path / "checkpoint")
    arguments = ("--model", tmp_path / "model", "--checkpoint", tmp_path / "checkpoint", "--context", 80)
    found = rows("generate_e2e", *arguments, "--tokens", 2)
    assert set(found) == {"dynamic_cache", "preallocated", "dynakv"}
    assert found["dynakv"]["ms_per_token"] > 0


@torch.no_grad()
def test_weights_by_columns_are_the_same_weights(rows, caches):
    model = tiny_model()
    ids = torch.arange(1, 40)[None]
    expected = model(ids).logits
    lay_out_by_columns(model)
    weight = model.model.layers[0].mlp.down_proj.weight
    assert weight.stride() == (1, weight.shape[0])
    torch.testing.assert_close(model(ids).logits, expected)
    assert list(rows("generate_e2e", *caches, "--tokens", 2, "--columns")) == CACHES


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_decoding_compiled(rows, caches, dtype):
    found = rows("generate_e2e", *caches, "--tokens", 2, "--caches", "dynakv", "--dtype", dtype, "--compile")
    assert list(found) == [*CACHES[:2], "dynakv"]


@torch.no_grad()
def test_a_compiled_step_that_is_wrong_is_not_timed(monkeypatch):
    """In half precision, too, where it is judged by how far the uncompiled step is from fp32."""
    from benchmarks import generate_e2e

    model = tiny_model().bfloat16()
    found = {"full": (model, lambda: DynamicCache(config=model.config))}
    exact = {"full": generate_e2e._checked((tiny_model(), lambda: DynamicCache(config=model.config)))}

    def spoil(model):
        model.lm_head.weight.data[:10] *= 1.2

    monkeypatch.setattr(generate_e2e, "compile_decoding", lambda model: None)
    generate_e2e.compile_all(found, exact)
    monkeypatch.setattr(generate_e2e, "compile_decoding", spoil)
    with pytest.raises(AssertionError, match="^full: "):
        generate_e2e.compile_all(found, exact)


def test_a_model_that_is_only_a_configuration(rows, tmp_path):
    model = tiny_model(num_hidden_layers=1)
    model.config.save_pretrained(tmp_path / "model")
    found = rows(
        *("generate_e2e", "--model", tmp_path / "model", "--made-up", "0.25,0.5", "--granularity", 8),
        *("--context", 200, "--tokens", 2, "--batch", 2),
    )
    assert list(found) == CACHES
    assert found["dynakv"]["batch"] == 2
    assert found["dynakv"]["rate"] == pytest.approx(0.375, abs=0.04)


def test_without_a_compressor_and_bases_both_are_made_up_and_it_is_said(caches, capsys, tmp_path):
    from benchmarks import generate_e2e

    output = tmp_path / "out"
    arguments = (*caches[:2], "--context", 200, "--tokens", 2, "--granularity", 4, "--results", output)
    generate_e2e.main([*map(str, arguments)])
    printed = capsys.readouterr().out
    assert (
        "random tokens give the bases of all compressed caches, and dynakv keeps 0.16 of the keys and 0.44" in printed
    )
    found = read(output, "generate_e2e", printed)
    assert list(found) == CACHES
    assert found["dynakv"]["rate"] == pytest.approx(0.3, abs=0.08)


def test_one_cache_of_those_there_are(rows, caches):
    assert list(rows("generate_e2e", *caches, "--tokens", 2, "--caches", "ojakv-pf")) == [*CACHES[:2], "ojakv-pf"]
    with pytest.raises(
        UserError, match="`--caches` must be among .* dynakv, ojakv-pf, ojakv-joint; got 'dynakv-paged'"
    ):
        rows("generate_e2e", *caches, "--caches", "ojakv-pf,dynakv-paged")


def test_what_is_checked_are_the_settings_that_are_timed(rows, caches, monkeypatch):
    """At the preset's own settings, which nobody times, nothing is wrong here."""
    attend = WindowedLayer._attend_low_rank

    def wrong_with_integers(layer, query, mask, scoring):
        output = attend(layer, query, mask, scoring)
        return output * (1.1 if getattr(layer.config, "cache_dtype", None) == "int4" else 1)

    monkeypatch.setattr(WindowedLayer, "_attend_low_rank", wrong_with_integers)
    arguments = (*caches, "--tokens", 2, "--presets", "ojakv-joint,ojakv-joint+cache_dtype=int4")
    assert "ojakv-joint" in rows("generate_e2e", *arguments, "--caches", "ojakv-joint")
    with pytest.raises(AssertionError, match=r"^ojakv-joint\+cache_dtype=int4: "):
        rows("generate_e2e", *arguments)


def test_settings_that_lose_something_at_full_rank_are_timed_too(rows, caches):
    names = [f"ojakv-joint+{setting}" for setting in ("cache_dtype=int4", "attention=reconstructed", "ranks=budget")]
    presets = [*names, "ojakv-pf+cache_dtype=int8+eviction={keep_ratio: 0.5}"]
    found = rows("generate_e2e", *caches, "--tokens", 2, "--presets", ",".join(presets))
    assert list(found) == [*CACHES[:3], *presets]


def test_presets_at_rates_of_their_own_beside_shares_of_the_same_bases(rows, caches):
    model_and_bases = [*caches[:2], *caches[4:6]]
    arguments = (*model_and_bases, "--context", 200, "--tokens", 2, "--shares", "0.25,0.5", "--granularity", 4)
    found = rows("generate_e2e", *arguments, "--presets", "ojakv-joint@0.25,ojakv-joint@0.75+compress=keys")
    assert list(found) == [*CACHES[:2], "dynakv", "ojakv-joint@0.25", "ojakv-joint@0.75+compress=keys"]
    assert found["ojakv-joint@0.25"]["rate"] < 0.8 < found["ojakv-joint@0.75+compress=keys"]["rate"]
    assert found["dynakv"]["rate"] == pytest.approx(0.375, abs=0.1)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "generate_e2e",
            ("--presets", "ojakv-pf@x"),
            "argument --presets: ojakv-pf@x: `rate` must be a number, got 'x'",
        ),
        ("generate_e2e", ("--presets", "ojakv-pf+pol=2"), "`pol` in preset ojakv-pf; did you mean `pool`"),
        ("decode_op", ("--layers", 0), "argument --layers: must be a whole number of at least 1; got '0'"),
        ("decode_op", ("--batches", "1,x"), "argument --batches: must be a whole number of at least 1; got 'x'"),
        ("decode_op", ("--repeats", 0), "argument --repeats: must be"),
        ("generate_e2e", ("--context", 0), "argument --context: must be"),
        ("prefill", ("--repeats", -1), "argument --repeats: must be"),
    ],
)
def test_counts_are_counts(capsys, name, arguments, message):
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmarks.{name}").main([*map(str, arguments)])
    assert message in capsys.readouterr().err


def test_granules_are_of_the_width():
    from benchmarks import decode_op

    with pytest.raises(UserError, match="`--granule` must be at most the joint width, 192; got 500"):
        decode_op.main(["--granule", "500"])


def test_what_was_asked_for_must_fit(caches, capsys):
    e2e = importlib.import_module("benchmarks.generate_e2e")
    arguments = [str(each) for each in caches]
    with pytest.raises(UserError, match="`the context` is 300 tokens, but this model has 256 positions"):
        e2e.main([*arguments, "--context", "300"])
    with pytest.raises(UserError, match="`--context` must be more than what is decoded after the prompt; got 20"):
        e2e.main([*arguments, "--context", "20"])
    with pytest.raises(SystemExit):
        e2e.main([*arguments, "--made-up", "0.3"])
    assert "argument --made-up: must be two shares in (0, 1]" in capsys.readouterr().err


def test_time_to_first_token(rows, caches):
    found = rows("prefill", *caches, "--repeats", 1)
    assert list(found) == CACHES
    for row in found.values():
        assert row["flop_fraction"] > 0
        assert row["ratio_to_preallocated"] == pytest.approx(
            row["ms_to_first_token"] / found["preallocated"]["ms_to_first_token"]
        )


def test_time_to_first_token_of_later_turns(rows, caches):
    found = rows("prefill", *caches, "--repeats", 2, "--turn", 17)
    assert list(found) == CACHES
    for row in found.values():
        assert row["ms_to_first_token_of_turn"] > 0
        assert row["turn_ratio_to_dynamic_cache"] == pytest.approx(
            row["ms_to_first_token_of_turn"] / found["dynamic_cache"]["ms_to_first_token_of_turn"]
        )


def test_saved_prefixes(rows, caches):
    found = rows("saved_prefix", *caches, "--repeats", 1)
    assert list(found) == [name for name in CACHES if name != "preallocated"]
    for row in found.values():
        assert row["load_over_read"] == pytest.approx(row["ms_to_load"] / row["ms_to_read"])
        assert row["file_over_uncompressed"] == row["file_bytes"] / found["dynamic_cache"]["file_bytes"]
    full = 2 * 80 * 3 * 2 * 16 * 4
    assert full < found["dynamic_cache"]["file_bytes"] < full + 4096


def test_memory(rows, caches):
    found = rows("memory", *caches, "--sequences", 3)
    assert list(found) == CACHES
    assert found["preallocated"]["largest_batch"] == 3, "the memory that is shared is that of three"
    if not IS_OLDEST:  # whose preallocated cache takes more
        assert found["dynamic_cache"]["largest_batch"] < 3, "it copies a layer for every token"
    assert found["dynakv"]["largest_batch"] > 3
    for row in found.values():
        assert row["allocated_over_counted"] == pytest.approx(1, abs=0.03)
        assert row["share_of_ideal"] == pytest.approx(row["largest_batch"] / 3 * row["rate"])


def test_one_operation_from_the_shell(run, tmp_path):
    arguments = ("--context", 64, "--layers", 1, "--repeats", 1, "--results", tmp_path / "out")
    done = run("-m", "benchmarks.decode_op", *arguments)
    found = read(tmp_path / "out", "decode_op", done.stdout)
    ours = ["ojakv 0.6", "ojakv 0.3", "ojakv-joint 0.5", "ojakv-joint 0.3", "dynakv 0.30", "dynakv 0.12"]
    assert list(found) == ["preallocated", "concatenated", *ours]
    for row in found.values():
        assert row["us_per_layer"] > 0
        assert row["bandwidth_fraction"] > 0
    assert found["dynakv 0.30"]["rate"] == pytest.approx(0.3, abs=0.06)


def test_a_training_step(rows, tiny_dir):
    found = rows("training_step", "--model", tiny_dir, "--dtype", "float32", "--length", 32, "--repeats", 1)
    assert list(found) == ["plain", "dynakv", "dynakv, whole step"]
    plain = found["plain"]["ms_per_step"]
    for row in found.values():
        assert 0 < row["ms_per_step"] < 60_000
        assert row["ratio_to_plain"] == pytest.approx(row["ms_per_step"] / plain)
        assert 0 < row["flop_fraction"] < 1


@pytest.mark.slow  # two processes that import everything
def test_a_checkout_is_as_fast_as_itself_give_or_take(caches, tmp_path, capsys):
    model, checkpoint, bases = caches[1], caches[3], caches[5]
    arguments = ["--other", ROOT, "--model", model, "--checkpoints", checkpoint, checkpoint, "--bases", bases, bases]
    sizes = ["--context", 80, "--rounds", 3, "--tokens", 1, "--repeats", 2]
    compare_checkouts.main([*map(str, [*arguments, *sizes, "--results", tmp_path / "out"])])
    record = only_record(tmp_path / "out")
    whats = [
        f"{what} {method}"
        for method in ("dynamic_cache", "dynakv", "ojakv-pf", "ojakv-joint")
        for what in ("decode", "prefill")
    ]
    assert [row["what"] for row in record["rows"]] == whats
    assert all(0 < row["lower"] <= row["median_of_ratios"] <= row["upper"] for row in record["rows"])
    assert [row["n"] for row in record["rows"]] == [6, 2] * 4
    assert record["config"]["other_commit"] == record["code"]["commit"]
    assert "decode dynakv" in capsys.readouterr().out


def test_a_checkout_whose_worker_fails_leaves_none_behind(tmp_path, monkeypatch):
    """The first to be asked ends, and the other waits for a request."""
    worker = tmp_path / "worker.py"
    worker.write_text('import sys\nprint(\'{"methods": ["dynakv"]}\', flush=True)\nsys.stdin.readline()\n')
    monkeypatch.setattr(compare_checkouts, "WORKER", worker)
    started, start = [], compare_checkouts.Worker.__init__

    def noted(self, *arguments):
        start(self, *arguments)
        started.append(self.process)

    monkeypatch.setattr(compare_checkouts.Worker, "__init__", noted)
    sizes = {"context": 8, "rounds": 1, "tokens": 1, "repeats": 1}
    settings = {"model": "m", "presets": [], "rate": 0.3, "checkpoints": "cc", "bases": "bb", **sizes}
    with pytest.raises(AssertionError, match="the worker ended"):
        compare_checkouts.decode_and_prefill(argparse.Namespace(**settings), dict.fromkeys(("other", "this"), ROOT))
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


def test_what_is_wrong_is_not_timed():
    right = torch.zeros(2, 3)
    check_close("a cache", right, right)
    with pytest.raises(AssertionError, match="^a cache: "):
        check_close("a cache", right + 2e-3, right)


def test_what_an_fp32_model_stores_in_half_precision_is_judged_as_that():
    right = torch.linspace(-10, 10, 50)
    check_close("a plan", right + 0.19, right, stored_in_half=True)
    with pytest.raises(AssertionError, match="^a plan: "):
        check_close("a plan", right + 0.21, right, stored_in_half=True)


def test_in_half_precision_what_is_timed_may_be_as_far_from_fp32_as_its_reference():
    exact = torch.linspace(-10, 10, 50)
    reference, near, far = (exact.bfloat16() + error for error in (0.3, -0.3, -0.6))
    check_close("a cache", reference + 0.1, reference)
    check_close("a cache", near, reference, lambda: exact)
    for wrong in (far, reference + 0.3):
        with pytest.raises(AssertionError, match="a cache"):
            check_close("a cache", wrong, reference, lambda: exact)
    with pytest.raises(AssertionError, match="a cache"):
        check_close("a cache", near, reference)
