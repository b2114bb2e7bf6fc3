"""What a row of a page may hold beside plans of bits: learned ranks, floats and integers; and plans that were trained."""

import json

import pytest
from served_engines import NEW, greedy, prompt_of, served, serving, texts, with_compressor
from training_runs import train_here

from dynakv import DynaKVCache

PROMPTS = [prompt_of(length, length) for length in (5, 40, 80)]  # which one step can read


@pytest.mark.parametrize("stored", [{}, {"cache_dtype": "int8"}, {"cache_dtype": "int4", "group_size": 16}])
def test_learned_ranks_say_what_generate_says(files, gated, stored):
    settings = {"checkpoint": str(gated), "page_margin": 5.0, **stored}
    with serving(files, settings) as engine:
        found = texts(served(engine, PROMPTS))
    model = with_compressor(gated, **stored)
    assert found == [greedy(model, DynaKVCache.from_model(model), prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "changes",
    [
        {"preset": "static-joint-pf", "rate": 0.5, "page_margin": None},
        {"preset": "static-joint-pf", "rate": 0.5, "page_margin": None, "cache_dtype": "int8"},
        {"rebuild_cost": 6.0},
    ],
)
def test_shared_bases_say_what_generate_says(files, changes):
    settings = {**files.settings, **changes}
    with serving(files, settings) as engine:
        found = texts(served(engine, PROMPTS))
    assert found == [files.generated(prompt, **settings) for prompt in PROMPTS]


def test_pages_are_as_large_as_what_was_measured(files, gated):
    from lowrank_kv_vllm.statistics import of_process

    saved = json.loads((gated / "config.json").read_text())["summary"]["heldout"]
    [measured] = saved.values()
    rate = sum(sum(side) for side in measured["layer_rates"].values()) / 6
    of_process.cache_clear()
    with serving(files, {"checkpoint": str(gated)}) as engine:
        served(engine, PROMPTS)
        statistics = of_process()
    uncompressed = 3 * 2 * 64 * 4
    assert statistics.uncompressed_bytes == uncompressed
    # Beside the coefficients and the margin: two bytes of each rank, an eighth of one of each place, and alignment.
    assert statistics.token_bytes / uncompressed == pytest.approx(rate * 1.03 + 6 * 2.2 / uncompressed, abs=0.02)
    assert statistics.num_written == 6 * (sum(map(len, PROMPTS)) + len(PROMPTS) * (NEW - 1))
    assert 0 < statistics.num_cut < statistics.num_written / 4  # random tokens differ from the text
    assert f"{statistics.num_cut} of {statistics.num_written} keys and values written (" in str(statistics)


def test_a_plan_that_was_trained(files, training_values, tmp_path):
    learns = {
        "model": str(files.directory / "model"),
        "compressor": {"rank_policy": "plan"},
        "calibration": {"start": None, "tokens": 1920},
        "rate": {"target_retain_rate": 0.3},
        "loss": {"cross_entropy": 0, "distillation": 1},
        "optimizer": {"steps": 4, "lr_projection": 1e-2},
    }
    checkpoint = train_here(training_values, tmp_path / "run", **learns)
    with serving(files, {"checkpoint": str(checkpoint), "page_margin": 5.0}) as engine:
        found = texts(served(engine, PROMPTS))
    model = with_compressor(checkpoint, exact_tokens={"num_sink_tokens": 1, "recent_window": 0, "update_period": 1})
    assert found == [greedy(model, DynaKVCache.from_model(model), prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("policy", ["nested", "soft_threshold"])
def test_ranks_that_all_tokens_of_a_layer_share(files, training_values, tmp_path, policy):
    learns = {
        "model": str(files.directory / "model"),
        "compressor": {"rank_policy": policy},
        "rate": {"target_retain_rate": 0.4},
        "optimizer": {"steps": 4},
    }
    checkpoint = train_here(training_values, tmp_path / "run", **learns)
    with serving(files, {"checkpoint": str(checkpoint), "page_margin": 5.0}) as engine:
        found = texts(served(engine, PROMPTS))
    model = with_compressor(checkpoint)
    assert found == [greedy(model, DynaKVCache.from_model(model), prompt) for prompt in PROMPTS]
