"""Texts of 64 tokens behind 32 prompts are those of `generate()` with the same caches, whatever way they are served in."""

import pytest
import torch
from served_engines import metric, prompt_of, served, serving, texts, with_compressor

from dynakv import DynaKVCache

NEW = 64
PROMPTS = [prompt_of(2 + 7 * i % 97, 100 + i) for i in range(32)]
# With rebuilt prompts a text depends on nothing but its tokens, so that one reference holds for all ways.
SETTINGS = {"prefill": "reconstructed", "page_margin": 5.0}
WAYS = {
    "one by one": {"max_num_seqs": 1},
    "sixteen at once, then from prefixes": {},
    "in chunks": {"max_num_batched_tokens": 24},
    "preempted": {"num_gpu_blocks_override": 24, "enable_prefix_caching": False},
    "compiled": {"enforce_eager": False},
}


@pytest.fixture(scope="module", params=["learned ranks", "a plan of bits"])
def caches(request, files, gated):
    """(settings of a server, the texts that `generate()` writes with such caches)."""
    if request.param == "learned ranks":
        settings = {"checkpoint": str(gated), **SETTINGS}
        model = with_compressor(gated, prefill=SETTINGS["prefill"])
        return settings, [generated(model, DynaKVCache.from_model(model), prompt) for prompt in PROMPTS]
    settings = {**files.settings, **SETTINGS}
    return settings, [generated(files.model, files.cache(**settings), prompt) for prompt in PROMPTS]


def generated(model, cache, prompt: list[int]) -> list[int]:
    found = model.generate(
        torch.tensor([prompt]), past_key_values=cache, do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW
    )
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("way", WAYS)
def test_all_texts_are_those_of_generate(files, caches, way):
    settings, expected = caches
    with serving(files, settings, **WAYS[way]) as engine:
        found = served(engine, PROMPTS, NEW)
        assert texts(found) == expected
        if way == "preempted":
            assert metric(engine, "vllm:num_preemptions") > 0
        if way.endswith("from prefixes"):
            again = served(engine, PROMPTS, NEW)
            assert sum(output.num_cached_tokens > 0 for output in again) >= 16
            assert texts(again) == expected
