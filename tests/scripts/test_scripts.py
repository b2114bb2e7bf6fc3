"""The other commands, run as a user runs them, on a tiny model."""

import json
import shutil

import pytest

import dynakv
from dynakv.checkpoint_files import read_config
from dynakv.measured_rates import measured_rates
from lowrank_kv.hf.loading import load_model
from lowrank_kv.utils import run_record
from lowrank_kv_cli.__main__ import dispatch


def only_record(output):
    [path] = output.glob("*/*.json")
    return run_record.load(path)


def test_generate_reads_prompts_and_reports_bytes(run, checkpoint, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the cache keeps")
    words = ("--prompt", f"@{prompt}", "--max-new-tokens", 4, "--sample", "--dtype", "float32")
    done = run("generate", "--checkpoint", checkpoint, *words)
    assert not done.stdout.startswith("the cache keeps"), "a long prompt would fill the screen"
    report = done.stdout.splitlines()[-1]
    # 15 prompt tokens and 4 new ones, of which the last is never cached.
    assert "for 18 tokens" in report
    assert f"(uncompressed: {18 * 2 * 2 * 32 * 4:,} bytes)" in report


def test_generate_fills_a_cache_whatever_a_models_own_settings_say(here, bases, tiny_dir, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**settings, "use_cache": False, "num_beams": 2}))
    words = ("--bases", bases, "--prompt", "the cache keeps what " * 8, "--max-new-tokens", 4)
    assert "cache: " in here("generate", "--model", model, *words)


def test_generate_serves_int8_and_evicts_where_asked(here, checkpoint):
    command = ("generate", "--checkpoint", checkpoint, "--dtype", "float32", "--prompt", "the cache keeps what " * 8)
    sizes = []
    for options in ((), ("--cache-dtype", "int8"), ("--cache-dtype", "int8", "--evict", 0.5)):
        report = here(*command, "--max-new-tokens", 4, *options).splitlines()
        sizes.append(int(next(line.split()[1] for line in report if line.strip().startswith("total")).replace(",", "")))
    assert sizes[2] < 0.75 * sizes[1] < 0.75 * 0.6 * sizes[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--checkpoint", "nowhere", "--prompt", "x"), "checkpoint directory `nowhere` does not exist"),
        (("--checkpoint", "RUN", "--prompt", "x"), "checkpoint`?"),
        (("--prompt", "@nowhere.txt"), "cannot read the prompt file `nowhere.txt`"),
        (("--prompt", "LATIN"), "is not UTF-8 text"),
        (
            ("--prompt", "x", "--device", "gpu"),
            "`device` must be one that torch can use here, such as cpu; got 'gpu': Expected one of cpu",
        ),
        (
            ("--prompt", "x", "--device", "cuda:99"),
            "`device` must be one that torch can use here, such as cpu; got 'cuda:99'",
        ),
        (
            ("--prompt", "x", "--device", "meta"),
            "`device` must be one that torch can use here, such as cpu; got 'meta', which has shapes and no numbers",
        ),
        (("--prompt", "x", "--max-new-tokens", "0"), "`--max-new-tokens` must be at least 1, got 0"),
        (
            ("--prompt", "x", "--evict", "0"),
            "`eviction.keep_ratio` must be in (0, 1]; 0.2 keeps a fifth of a prompt; got 0.0",
        ),
        (("--prompt", "x", "--chat"), "`--chat` needs a chat template"),
        (("--prompt", "x", "--temperature", "1.2"), "`--temperature` is of sampling: give `--sample`, too"),
        (("--prompt", "x", "--seed", "0"), "`--seed` is of sampling: give `--sample`, too"),
        *(
            (
                ("--prompt", "x", "--sample", "--temperature", value),
                "`--temperature` must be at least 1e-06 and finite; leave out `--sample`",
            )
            for value in ("nan", "inf", "0.0", "1e-40")
        ),
        *(
            (
                ("--prompt", "x", "--sample", "--seed", value),
                f"`--seed` must be at least 0 and below 2³¹; got {value}",
            )
            for value in ("-1", "99999999999999999999")
        ),
        (("--prompt", "x", "--max-new-tokens", "600"), "is 601 tokens, but this model has 512 positions"),
    ],
)
def test_generate_mistakes_end_in_one_paragraph(mistake, checkpoint, tmp_path, arguments, message):
    latin = tmp_path / "latin.txt"
    latin.write_bytes("café".encode("latin1"))
    words = {"LATIN": f"@{latin}", "RUN": checkpoint.parent}
    arguments = [words.get(word, word) for word in arguments]
    if "--checkpoint" not in arguments:
        arguments = ("--checkpoint", checkpoint, *arguments)
    assert message in mistake("generate", *arguments)


def test_a_stock_model_directory_is_no_checkpoint(run, tiny_dir):
    done = run("generate", "--checkpoint", tiny_dir, "--prompt", "x", check=False)
    assert done.returncode == 2
    assert "no DynaKV compressor" in done.stderr
    assert "Traceback" not in done.stderr


def test_measure_says_what_it_found(capsys, checkpoint, text_file, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    words = ("--checkpoint", tmp_path / "checkpoint", "--name", text_file, "--tokens", 256, "--length", 64)
    dispatch(["measure", *map(str, words)])
    told = capsys.readouterr()
    rate = measured_rates(tmp_path / "checkpoint", read_config(tmp_path / "checkpoint")).mean
    assert f"keeps {rate:.3f} of " in told.out
    assert "256 tokens of text.jsonl" in told.out
    assert "measuring: 100%" in told.err


def test_measure_takes_the_place_of_what_was_measured_before_and_keeps_the_rest(checkpoint, text_file, tmp_path):
    directory = tmp_path / "checkpoint"
    model = dynakv.attach(load_model(read_config(checkpoint).base_model), checkpoint)
    before = {"other.txt": {"hard_rate": 0.9}, "text.jsonl": {"hard_rate": 0.8}}
    dynakv.save_compressor(model, directory, summary={"alpha": 2.0, "heldout": before})
    beside = {"README.md": "the card", "run.json": '{"run_id": "r"}'}
    for name, text in beside.items():
        (directory / name).write_text(text)
    words = ("--checkpoint", directory, "--name", text_file, "--tokens", 256, "--length", 64)
    dispatch(["measure", *map(str, words)])
    found = read_config(directory).summary
    assert list(found["heldout"]) == ["text.jsonl", "other.txt"]
    assert found["heldout"]["text.jsonl"].keys() > {"hard_rate", "layer_rates"}
    assert (found["alpha"], found["heldout"]["other.txt"]) == (2.0, before["other.txt"])
    assert {name: (directory / name).read_text() for name in beside} == beside


@pytest.fixture(scope="module")
def bases(run, tiny_dir, text_file, tmp_path_factory):
    directory = tmp_path_factory.mktemp("bases") / "tiny"
    command = ("calibrate", "--model", tiny_dir, "--output", directory, "--name", text_file)
    done = run(*command, "--tokens", 512, "--length", 64)
    assert "2 compressed layers of 2 KV heads × 16 dims, 512 tokens" in done.stdout
    assert "without `--read_gradients true` these bases serve `ojakv-joint`, at 60% of the coefficients" in done.stdout
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "moments.safetensors"]
    return directory


def test_generate_needs_no_training(here, mistake, bases, tiny_dir, text_file, tmp_path):
    model = ("--model", tiny_dir, "--dtype", "float32")

    def rate_of(*options) -> float:
        prompt = ("--prompt", "the cache keeps what " * 20, "--max-new-tokens", 4)
        report = here("generate", *model, "--bases", bases, *prompt, *options)
        return float(report.splitlines()[-1].partition(", rate ")[2].split()[0])

    assert rate_of("--preset", "static-joint-pf", "--rate", 0.3) < rate_of("--preset", "static-joint-pf", "--rate", 0.8)
    assert rate_of() > 0  # `ojakv-joint`: these bases were made without what plans of bits need
    report = here("generate", *model, "--bases", bases, "--prompt", "the cache " * 40)
    assert "\npreset ojakv-joint, rate 0.6 of the coefficients\n" in report
    rate, _, told = report.splitlines()[-1].partition(", rate ")[2].partition(" (uncompressed: ")
    assert " bytes), in float32; " in told
    assert told.endswith(" of what 16 bits would take")
    assert float(told.split("; ")[1].split()[0]) == pytest.approx(2 * float(rate), abs=0.0015)
    missing = ("--model", "nowhere", "--bases", bases, "--prompt", "@none.txt")
    assert "cannot read the prompt file `none.txt`" in mistake("generate", *missing), "before the model"
    for option, value, message in (
        ("--split", "validation", "`split` must be left out of files"),
        ("--subset", "foo", "`subset` must be left out of files"),
        ("--joint-layers", 2, "`joint_layers` must be left out without `read_gradients`"),
    ):
        words = ("--model", tiny_dir, "--name", text_file, "--output", tmp_path / "other", option, value)
        assert message in mistake("calibrate", *words)
    words = ("--model", tiny_dir, "--name", text_file, "--output", tmp_path / "other", "--read_gradients", "true")
    assert "`read_energy` must be left out beside `read_gradients`" in mistake(
        "calibrate", *words, "--read_energy", "true"
    )
    assert "needs `--model`" in mistake("generate", "--bases", bases, "--prompt", "x")
    stray = ("--checkpoint", "nowhere", "--rate", 0.1, "--prompt", "x")
    assert "`--rate` is of bases" in mistake("generate", *stray)
    swapped = ("--checkpoint", bases, "--prompt", "x")
    assert f"got the calibration `{bases}`; give it as `--bases`" in mistake("generate", *swapped)
    absent = ("--model", tiny_dir, "--bases", "nowhere", "--prompt", "x")
    assert "`--bases` must be a directory that `lowrank-kv calibrate` wrote" in mistake("generate", *absent)
    unknown = ("--model", tiny_dir, "--bases", bases, "--preset", "ojakv-jiont", "--prompt", "x")
    assert "unknown preset `ojakv-jiont`; did you mean `ojakv-joint`?" in mistake("generate", *unknown)


def test_a_text_too_short_to_gain_says_so(here, bases, tiny_dir):
    command = ("generate", "--model", tiny_dir, "--bases", bases, "--max-new-tokens", 4)
    assert "a text this short gains nothing" in here(*command, "--prompt", "the cache")
    static = (*command, "--preset", "static-joint-pf", "--rate", 0.3, "--prompt")
    assert "a text this short gains little" in here(*static, "the cache keeps what " * 4)
    assert "a text this short" not in here(*static, "the cache keeps what " * 20)


@pytest.mark.parametrize("results", ["file.json", "file.json/results"])
def test_a_place_that_cannot_be_written_is_said_before_the_work(here, capsys, tmp_path, results):
    (tmp_path / "file.json").write_text("{}")
    arguments = ("--model", "./nowhere", "--bases", "nowhere", "--text", "a=b", "--results", tmp_path / results)
    with pytest.raises(SystemExit) as ended:
        here("scripts/measure_domain_shift.py", *arguments)
    assert ended.value.code == 2
    assert "cannot be a directory, since" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "message"),
    [(".", "is a directory, and a file is to be written"), ("file.json/rows.json", "cannot be a directory, since")],
)
def test_a_file_that_cannot_be_written_is_said_before_the_work(here, capsys, tmp_path, output, message):
    (tmp_path / "file.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        here("scripts/tokenize_as_wikitext.py", "--name", "nowhere.txt", "--output", tmp_path / output)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_shift_is_measured(run, tiny_dir, bases, text_file, tmp_path):
    command = ("scripts/measure_domain_shift.py", "--model", tiny_dir, "--bases", bases, "--text", f"same={text_file}")
    done = run(*command, "--prefix", 128, "--tokens", 128, "--results", tmp_path)
    record = only_record(tmp_path)
    assert [each["role"] for each in record["inputs"]] == ["bases", "model", "text"]
    assert record["n"] == {"texts": 1, "tokens": 128}
    assert record["config"]["updates"].keys() == {row["update"] for row in record["rows"]}
    rows = record["rows"]
    assert len(rows) == 4 * 2 * 3
    oracle = [row for row in rows if row["basis"] == "oracle"]
    assert all(row["overlap"] == pytest.approx(1) for row in oracle)
    for static, best in zip(rows[::3], oracle, strict=True):
        assert 0 <= best["relative_error"] <= static["relative_error"] <= 1
    assert done.stdout.count("| same |") == 8


def test_updates_are_measured(run, tiny_dir, bases, text_file, tmp_path):
    command = (
        "scripts/measure_update_policies.py",
        "--model",
        tiny_dir,
        "--bases",
        bases,
        "--text",
        f"same={text_file}",
    )
    done = run(*command, "--prefix", 128, "--tokens", 256, "--triggers", 0.01, 1e9, "--results", tmp_path)
    rows = {row["rule"]: row for row in only_record(tmp_path)["rows"]}
    assert list(rows) == ["periodic", "triggered 0.01", "triggered 1e+09", "prompt only"]
    # No update is ever worth so much: the basis stays as the prompt left it.
    assert rows["triggered 1e+09"]["updates"] == rows["prompt only"]["updates"]
    assert rows["triggered 1e+09"]["perplexity"] == pytest.approx(rows["prompt only"]["perplexity"], rel=1e-4)
    assert rows["prompt only"]["updates"] < rows["triggered 0.01"]["updates"] <= rows["periodic"]["updates"]
    assert done.stdout.count("| same |") == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--name", "nowhere.jsonl"), "the data file `nowhere.jsonl` does not exist"),
        (("--tokens", "0"), "`tokens` must be at least 1; got 0"),
        (("--tokens", "2", "--name", "a.txt,b.txt,c.txt"), "`tokens` must be at least 3, one of every text in `name`"),
        (("--length", "4096", "--tokens", "4096"), "`length` is 4096 tokens, but this model has 512"),
        (("--nmae", "x"), "did you mean `--name`"),
    ],
)
def test_calibrate_mistakes_end_in_one_paragraph(mistake, tiny_dir, text_file, tmp_path, arguments, message):
    command = ("calibrate", "--model", tiny_dir, "--output", tmp_path / "out")
    for option, value in (("--name", text_file), ("--length", 64)):
        if option not in arguments:
            command = (*command, option, value)
    assert message in mistake(*command, *arguments)
    assert not (tmp_path / "out").exists()
