"""`lowrank-kv inspect`: what is said of directories, and of caches before there is one."""

import dataclasses
import itertools
import json

import pytest
import torch
from methods import spread_gates

import dynakv
from dynakv.checkpoint_files import WEIGHTS, CheckpointConfig, read_config
from dynakv.config import DynaKVConfig
from dynakv.measured_rates import Rates
from dynakv.objective import RateRecorder
from lowrank_kv.calibration.activation_moments import calibrate
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.hf.loading import load_model, load_shape
from lowrank_kv.stores.quantization import MIXED
from lowrank_kv.utils.errors import UserError
from lowrank_kv_cli import generate
from lowrank_kv_cli.inspect_command import main
from lowrank_kv_cli.planned_cache import dynakv_nbytes, preset_nbytes
from ojakv import PRESETS, OjaKVCache, OjaKVConfig, make_plan
from ojakv.basis_plan import plan_of_shapes

IDS = torch.randint(1, 257, (1, 300), generator=torch.Generator().manual_seed(0))
LAYER_RATES = {"keys": [0.25, 0.5], "values": [0.75, 1.0]}


@pytest.fixture(scope="module")
def compressed(tiny_dir):
    model = load_model(str(tiny_dir))
    moments = calibrate(model, torch.randint(1, 257, (4, 64)), progress=False)
    dynakv.add_compressors(model, dynakv.DynaKVConfig(granularity=1))
    dynakv.initialize_from_moments(model, moments)
    spread_gates(model)
    return model


@pytest.fixture(scope="module")
def bases(tiny_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("bases") / "tiny"
    calibration = Calibration.from_text(load_model(str(tiny_dir)), IDS, progress=False)
    calibration.save(directory, model="tiny", text=["text.jsonl"], heldout_share=0.25)
    return directory


@pytest.fixture
def inspect(capsys):
    def call(*arguments: object):
        main([*map(str, arguments), "--json"])
        found = json.loads(capsys.readouterr().out)
        main([*map(str, arguments)])
        return found, capsys.readouterr().out

    return call


def test_a_compressor_says_its_rates_and_how_it_was_made(inspect, compressed, tmp_path):
    measured = {"hard_rate": 0.625, "perplexity": 9.5, "layer_rates": LAYER_RATES}
    directory = tmp_path / "run/checkpoint"
    read = [{"text": ["a.jsonl"], "split": "train", "heldout_share": 0.25}, {"text": ["b.txt", "c.txt"]}]
    summary = {"steps": 7, "heldout": {"text.jsonl": measured}, "texts_read": read}
    dynakv.save_compressor(compressed, directory, summary=summary)
    (directory / "run.json").write_text('{"run_id": "20260101T000000-abcdef"}')
    (tmp_path / "run/config.yaml").write_text("{dataset: {name: [a.jsonl]}, optimizer: {}, compressor: {}}")
    found, text = inspect(directory)
    assert found["kind"] == "DynaKV compressor checkpoint"
    assert found["shape"] == {"layers": [0, 1], "num_kv_heads": 2, "head_dim": 16, "width": 32}
    assert found["rates"] == {"source": "text.jsonl", "is_mean": False, "of_bytes": False, **LAYER_RATES}
    assert found["files"]["compressor.safetensors"] == (directory / "compressor.safetensors").stat().st_size
    assert found["training"]["dataset"] == {"name": ["a.jsonl"]}
    for part in ("steps 7", "perplexity 9.5", "dataset.name a.jsonl", "20260101T000000-abcdef", "granularity 1"):
        assert part in text
    assert "text a.jsonl, split train, heldout_share 0.25; text b.txt, c.txt\n" in text
    assert [line.split() for line in text.splitlines()[-2:]] == [["0", "0.250", "0.750"], ["1", "0.500", "1.000"]]


def test_lists_of_numbers_and_tables_are_told(inspect, compressed, tmp_path):
    """As a run has them that averages checkpoints, measures while it trains, or reads a data set without a subset."""
    by_step = [{"step": 10, "kl": 0.5}, {"step": 20, "kl": 0.25}]
    dynakv.save_compressor(
        compressed, tmp_path / "run/checkpoint", summary={"averaged_steps": [10, 2000], "heldout_by_step": by_step}
    )
    (tmp_path / "run/checkpoint/run.json").write_text('{"run_id": "20260101T000000-abcdef"}')
    (tmp_path / "run/config.yaml").write_text(
        "{dataset: {name: [a, b], subset: [null, c]}, optimizer: {}, compressor: {}}"
    )
    found, text = inspect(tmp_path / "run/checkpoint")
    assert "averaged_steps 10, 2,000" in text
    assert "dataset.subset none, c" in text
    assert "heldout_by_step" not in text
    assert found["summary"]["heldout_by_step"] == by_step


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ({"heldout": {"t": {"hard_rate": 0.3, "perplexity": 2.0}}}, "0.300 of all coefficients on t"),
        ({"heldout": {}, "calibrated_threshold": {"hard_rate": 0.4}}, "0.400 of all coefficients on the training text"),
        ({}, "rates       not recorded"),
    ],
)
def test_rates_that_were_not_measured_by_layer_are_not_made_up(inspect, compressed, tmp_path, summary, expected):
    dynakv.save_compressor(compressed, tmp_path / "checkpoint", summary=summary)
    _, text = inspect(tmp_path / "checkpoint")
    assert expected in text
    assert "layer " not in text


def test_nested_ranks_are_read_from_the_weights(inspect, tiny_dir, tmp_path):
    model = load_model(str(tiny_dir))
    dynakv.add_compressors(model, dynakv.DynaKVConfig(rank_policy="nested"))
    for rank, side in enumerate(dynakv.token_compressors(model), start=1):
        side.gate.rank.fill_(8 * rank)
    dynakv.save_compressor(model, tmp_path / "checkpoint")
    found, _ = inspect(tmp_path / "checkpoint")
    assert (found["rates"]["keys"], found["rates"]["values"]) == ([0.25, 0.75], [0.5, 1.0])


def test_a_full_checkpoint_and_a_calibration(inspect, compressed, bases, tmp_path):
    dynakv.save_full(compressed, tmp_path / "full")
    found, text = inspect(tmp_path / "full")
    assert (found["kind"], found["shape"]["width"]) == ("full DynaKV checkpoint", 32)
    assert "LlamaForCausalLM" in text
    with pytest.raises(UserError, match="the checkpoint `.*full` has a whole model; leave it out"):
        generate.main(["--checkpoint", str(tmp_path / "full"), "--model", "another", "--prompt", "x"])
    found, text = inspect(bases)
    assert found["moments"] == ["key", "query", "rotated_key", "value"]
    assert "holds    moments of keys, values and queries\n" in text
    assert (found["kind"], found["tokens"], found["text"]) == ("calibration", 300, ["text.jsonl"])
    assert found["sha256"] in text
    assert f"tokens 300, heldout_share 0.25, joint_layers 0, tokens_sha256 {found['tokens_sha256']}" in text


def test_what_a_calibration_is_for_is_said_in_words(inspect, tiny_dir, tmp_path):
    model, blocks_NT = load_model(str(tiny_dir)), torch.randint(1, 257, (2, 64))
    made = Calibration.from_text(
        model, blocks_NT, gradients=True, read_gradients=True, joint_layers=2, self_check=False
    )
    made.save(tmp_path / "bases", model="tiny", text=["text.jsonl"])
    _, text = inspect(tmp_path / "bases")
    assert "read gradients, for the mixed presets and plans of bits, joint layers included; gradients, for" in text
    assert "key_read_costs" not in text
    made = Calibration.from_text(model, blocks_NT, read_energy=True, joint_layers=0, self_check=False)
    made.save(tmp_path / "energies", model="tiny", text=["text.jsonl"])
    _, text = inspect(tmp_path / "energies")
    assert "queries; energies of what is read, for the mixed presets and plans of bits\n" in text


def test_only_what_the_project_writes_is_inspected(tiny_dir, compressed, tmp_path):
    dynakv.save_compressor(compressed, tmp_path / "run/checkpoint")
    refused = {tmp_path / "run": "did you mean `.*run/checkpoint`", tmp_path / "no": "no such directory"}
    for path, message in {**refused, tiny_dir: "give `--model`"}.items():
        with pytest.raises(UserError, match=f"is no checkpoint and no calibration.*{message}"):
            main([str(path)])
    with pytest.raises(UserError, match="inspect one thing"):
        main([])


def test_an_uncompressed_cache_is_known_from_the_configuration(inspect, tiny_dir, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_dir / "config.json").read_bytes())  # and no weights
    found, text = inspect("--model", tmp_path, "--tokens", 1000, "--batch", 3, "--dtype", "float16")
    assert [cache["bytes"] for cache in found["caches"]] == [3 * 1000 * 2 * 2 * 32 * 2]
    assert "768,000 " in text


def test_layers_with_a_window_are_told_apart(inspect, tmp_path):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = {"model_type": "qwen2", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vocab_size": 99, "intermediate_size": 64, "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps({**config, "use_sliding_window": True, "sliding_window": 17}))
    found, text = inspect("--model", tmp_path, "--tokens", 100)
    assert found["caches"][0]["bytes"] == 100 * 2 * 32 * 2
    assert found["sliding_window_bytes"] == 2 * 16 * 2 * 32 * 2
    assert "4,096 bytes, not counted" in text


@pytest.mark.parametrize("settings", [{}, {"cache_dtype": "int8"}, {"eviction": {"keep_ratio": 0.5}}], ids=str)
def test_a_dynakv_cache_takes_the_bytes_that_were_predicted(compressed, tmp_path, settings):
    dynakv.save_compressor(compressed, tmp_path / "checkpoint")
    model = load_model(compressed.config._name_or_path)
    dynakv.attach(model, tmp_path / "checkpoint", **settings)
    with torch.no_grad():
        with RateRecorder(model) as recorder:
            model(IDS, use_cache=False)
            keys_L, values_L = recorder.rates().hard_L2.T.tolist()
        cache = dynakv.DynaKVCache.from_model(model)
        cache.expect_prompt(IDS.shape[1])
        model(IDS, past_key_values=cache)
    dynakv.save_compressor(model, tmp_path / "served")
    rates = Rates(source="ids", keys=keys_L, values=values_L)
    predicted = dynakv_nbytes(read_config(tmp_path / "served"), rates, tokens=IDS.shape[1], itemsize=4)
    assert predicted == pytest.approx(cache.nbytes, rel=0.05)


def test_an_ojakv_cache_takes_the_bytes_that_were_predicted(inspect, tiny_dir, bases):
    model, calibration = load_model(str(tiny_dir)), Calibration.load(bases)
    common = ("--model", tiny_dir, "--tokens", IDS.shape[1], "--dtype", "float32")
    for preset, needs in {"static-pca-joint": (), "ojakv-pf": (), "ojakv-joint": ("--bases", bases)}.items():
        cache = OjaKVCache(model, make_plan(calibration, OjaKVConfig.preset(preset, rate=0.5)))
        with torch.no_grad():
            model(IDS, past_key_values=cache)
        found, _ = inspect(*common, "--preset", preset, "--rate", 0.5, *needs)
        assert found["caches"][1]["bytes"] == pytest.approx(cache.nbytes, rel=0.02)


def test_memory_holds_as_many_tokens_as_are_said(inspect, tiny_dir, bases):
    model, calibration = load_model(str(tiny_dir)), Calibration.load(bases)
    common = ("--model", tiny_dir, "--tokens", 300, "--dtype", "float32", "--memory", "300 KB")
    preset = ("--preset", "static-joint-pf", "--rate", 0.3, "--bases", bases)
    found, text = inspect(*common, *preset)
    uncompressed, compressed = (cache["tokens_within"] for cache in found["caches"])
    assert f"{compressed:,}" in text
    full = geometry_of(model).full_nbytes
    assert full(uncompressed, 4) <= 300_000 < full(uncompressed + 1, 4)
    plan = make_plan(calibration, OjaKVConfig.preset("static-joint-pf", rate=0.3))
    held = []
    for tokens in (compressed, compressed + 1):
        cache = OjaKVCache(model, plan)
        with torch.no_grad():
            model(torch.ones(1, tokens, dtype=torch.long), past_key_values=cache)
        held.append(cache.nbytes)
    assert held[0] <= 300_000 < held[1]
    two, _ = inspect(*common[:-1], "600 KB", "--batch", 2, *preset)
    assert [cache["tokens_within"] for cache in two["caches"]] == [uncompressed, compressed]


def test_no_cache_shrinks_with_the_length(bases):
    """Which `inspect --memory` relies on: it halves lengths."""
    calibration = Calibration.load(bases)
    sizes = {}
    for name in PRESETS:
        config = OjaKVConfig.preset(name)
        if config.cache_dtype != MIXED:
            plan = make_plan(calibration, dataclasses.replace(config, rank_multiple=1))
            sizes[name] = [preset_nbytes(plan, tokens=tokens, itemsize=2) for tokens in range(1, 400)]
    rates = Rates(source="", **LAYER_RATES)
    for policy, keep_ratio in itertools.product(("gate", "plan"), (1.0, 0.1)):
        compressor = DynaKVConfig(rank_policy=policy, eviction={"keep_ratio": keep_ratio})
        config = CheckpointConfig(
            method="", base_model="", geometry=calibration.geometry, compressor=compressor, summary={}
        )
        lengths = [*range(1, 400), 32_767, 32_768]
        sizes[policy, keep_ratio] = [dynakv_nbytes(config, rates, tokens=tokens, itemsize=2) for tokens in lengths]
    assert {name: found for name, found in sizes.items() if found != sorted(found)} == {}


def test_a_budget_is_a_rate(inspect, tiny_dir, bases):
    common = ("--model", tiny_dir, "--tokens", 300, "--dtype", "float32", "--preset", "ojakv-joint", "--bases", bases)
    found, text = inspect(*common, "--budget", "100 KB/300 tokens")
    assert 0.95 * 100_000 < found["caches"][1]["bytes"] <= 100_000
    cache = OjaKVCache.from_model(
        load_model(str(tiny_dir)), OjaKVConfig.preset("ojakv-joint"), bases=bases, budget="100 KB/300 tokens"
    )
    plan = cache.compressed_layers()[0].plan
    assert f"`--budget 100 KB/300 tokens` is a rate of {plan.config.rate:.4f}" in text
    tensors = [each for kv in plan.layers.values() for basis in kv for each in (basis.vectors_PWR, basis.energy_PR)]
    kept = sum(each.untyped_storage().nbytes() for each in tensors)
    saved = found["caches"][0]["bytes"] - found["caches"][1]["bytes"]
    since = kept * 300 // saved
    told = f"all sequences share bases of {kept:,} bytes, which they save from {since:,} tokens on, together; "
    assert told in text
    assert "it takes fewer bytes than uncompressed from" in text


def test_fractions_of_shapes_are_those_of_bases(tiny_dir, bases):
    geometry, calibration = geometry_of(load_shape(str(tiny_dir))), Calibration.load(bases)
    fractions = [name for name in PRESETS if OjaKVConfig.preset(name).ranks == "fraction"]
    for name in fractions:
        for settings in ({}, {"compress": "keys"}, {"rank_multiple": 8, "rate": 0.4}):
            config = OjaKVConfig.preset(name, **settings)
            plans = make_plan(calibration, config), plan_of_shapes(geometry, config)
            shapes = [
                [(index, side.vectors_PWR.shape, side.energy_PR.shape, side.is_compressed)]
                for plan in plans
                for index, pair in plan.layers.items()
                for side in pair
            ]
            assert shapes[: len(shapes) // 2] == shapes[len(shapes) // 2 :], (name, settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "0"), "`--tokens` must be at least 1; got 0"),
        (
            ("--preset", "ojakv-joint"),
            "follow from a calibration .*`--bases DIR`, or take .* eigen, ojakv, ojakv-paper",
        ),
        (("--preset", "tokenwise-mixed"), "`lowrank-kv calibrate .* --read_gradients true`"),
        (("--preset", "ojakv-jiont"), "did you mean `ojakv-joint`"),
        (("--preset", "ojakv-pf", "--rate", "2"), "`rate` must be in"),
        (("--rate", "0.5"), "`--rate` is of a preset: give `--preset`, too"),
        (("--budget", "1 KB/token"), "`--budget` is of a preset: give `--preset`, too"),
        (
            ("--preset", "ojakv-pf", "--budget", "1 KB/token"),
            "`--budget` finds a rate with a calibration's help: .*`--bases",
        ),
        (("--memory", "24"), "`--memory` must be a number of bytes with its unit"),
        (("--checkpoint", "CHECKPOINT"), "nobody measured what the checkpoint"),
    ],
)
def test_mistakes_say_what_to_do(compressed, tiny_dir, tmp_path, arguments, message):
    dynakv.save_compressor(compressed, tmp_path / "checkpoint")
    given = [str(tmp_path / "checkpoint") if word == "CHECKPOINT" else word for word in arguments]
    with pytest.raises(UserError, match=message):
        main(["--model", str(tiny_dir), *given])


@pytest.mark.parametrize(
    "stray", [("--memory", "24 GiB"), ("--tokens", "4096"), ("--preset", "ojakv-pf"), ("--dtype", "float32")]
)
def test_a_description_takes_nothing_of_a_cache_in_silence(tmp_path, stray):
    with pytest.raises(UserError, match=f"`{stray[0]}` is of the bytes of a cache: give `--model` in place of PATH"):
        main([str(tmp_path), *stray])


def test_a_checkpoint_s_measured_rates_become_bytes(inspect, compressed, tiny_dir, tmp_path):
    measured = {"hard_rate": 0.625, "perplexity": 9.5, "layer_rates": LAYER_RATES}
    dynakv.save_compressor(compressed, tmp_path / "checkpoint", summary={"heldout": {"text.jsonl": measured}})
    size = ("--tokens", 100, "--batch", 2, "--dtype", "float32")
    found, text = inspect("--model", tiny_dir, "--checkpoint", tmp_path / "checkpoint", *size)
    assert found["caches"][1]["bytes"] == 2 * (100 * (8 + 16 + 24 + 32) * 4 + 100 * 4 * 2 + 4 * 100)
    assert "0.625 of all coefficients, as on text.jsonl" in text
    saved = (tmp_path / "checkpoint" / WEIGHTS).stat().st_size
    assert f"all sequences share the compressor, {saved:,} bytes as saved; this is not counted here" in text
