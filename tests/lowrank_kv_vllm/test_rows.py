"""What a row of a page may hold beside plans of bits: learned ranks, as floats and as integers."""

import pytest
from methods import dynakv_model, tiny_model
from served_engines import greedy, prompt_of, served, serving, texts, with_compressor

import dynakv
from dynakv import DynaKVCache
from lowrank_kv_cli.__main__ import dispatch

PROMPTS = [prompt_of(length, length) for length in (5, 40, 80)]  # which one step can read


@pytest.fixture(scope="module")
def gated(files, text_file, tmp_path_factory):
    """A checkpoint with gates, measured by the command that the server names."""
    directory = tmp_path_factory.mktemp("gated") / "checkpoint"
    model = tiny_model(head_dim=32, vocab_size=257)
    dynakv_model(model, 0.4, granularity=4)
    dynakv.save_compressor(model, directory)
    words = ["--model", files.directory / "model", "--name", text_file, "--tokens", 2048, "--length", 128]
    dispatch([str(word) for word in ("measure", "--checkpoint", directory, *words)])
    return directory


@pytest.mark.parametrize("stored", [{}, {"cache_dtype": "int8"}, {"cache_dtype": "int4", "group_size": 16}])
def test_learned_ranks_say_what_generate_says(files, gated, stored):
    settings = {"checkpoint": str(gated), "page_margin": 5.0, **stored}
    with serving(files, settings) as engine:
        found = texts(served(engine, PROMPTS))
    model = with_compressor(gated, **stored)
    assert found == [greedy(model, DynaKVCache.from_model(model), prompt) for prompt in PROMPTS]
