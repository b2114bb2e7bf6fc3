"""Texts of 64 tokens behind 32 prompts are those of `generate()` with the same caches, whatever way they are served in."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from served_engines import metric, prompt_of, served, serving, texts, with_compressor
from transformers import Cache, PreTrainedModel

from benchmarks import right_texts
from dynakv import DynaKVCache

NEW = 64
PROMPTS = [prompt_of(2 + 7 * i % 97, 200 + i) for i in range(32)]
# With rebuilt prompts a text depends on nothing but its tokens, so that one reference holds for all ways.
SETTINGS = {"prefill": "reconstructed", "page_margin": 5.0}
WAYS = {
    "one by one": {"max_num_seqs": 1},
    "sixteen at once, then from prefixes": {},
    "in chunks": {"max_num_batched_tokens": 24},
    "preempted": {"num_gpu_blocks_override": 24, "enable_prefix_caching": False},
    "compiled": {"enforce_eager": False},
}


@dataclasses.dataclass
class Reference:
    """What `generate()` writes.

    Attributes:
        settings: of a server that keeps tokens as these caches do.
        texts: token ids behind each prompt.
    """

    model: PreTrainedModel
    make_cache: Callable[[], Cache]
    settings: dict[str, Any]
    texts: list[list[int]] = dataclasses.field(init=False)

    def __post_init__(self):
        self.texts = [self.generated(prompt) for prompt in PROMPTS]

    def generated(self, prompt: list[int]) -> list[int]:
        options = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW}
        found = self.model.generate(torch.tensor([prompt]), past_key_values=self.make_cache(), **options)
        return found[0, len(prompt) :].tolist()

    @torch.no_grad()
    def check_tie(self, prompt: list[int], text: list[int]) -> None:
        """That no token of a text lacks more of the likeliest one than in readings of this prompt by other sums."""
        expected = right_texts.Reference(self.model, self.make_cache).expected(prompt, NEW)
        [limit] = right_texts.limits([expected])
        assert limit.gap < right_texts.DECIDED  # otherwise a wrong text would do
        unknown = right_texts.Text(tuple(text), (0.0,) * NEW)  # nobody asked for log-probabilities
        [distance] = expected.distances([unknown], limit)
        assert distance.gap <= limit.gap


@pytest.fixture(scope="module")
def ranks(gated):
    model = with_compressor(gated, prefill=SETTINGS["prefill"])
    return Reference(model, lambda: DynaKVCache.from_model(model), {"checkpoint": str(gated), **SETTINGS})


@pytest.fixture(scope="module")
def plan(files):
    settings = {**files.settings, **SETTINGS}
    return Reference(files.model, lambda: files.cache(**settings), settings)


@pytest.mark.parametrize("way", WAYS)
def test_with_learned_ranks_all_texts_are_those_of_generate(files, ranks, way):
    for found in answers(files, ranks.settings, way):
        assert found == ranks.texts


@pytest.mark.parametrize("way", WAYS)
def test_with_a_plan_of_bits_texts_are_those_of_generate_but_for_ties(files, plan, way):
    """Sums in another order round a coefficient to another code now and then, which decides between two tokens that are
    equally likely."""
    for found in answers(files, plan.settings, way):
        parted = [i for i, (said, expected) in enumerate(zip(found, plan.texts, strict=True)) if said != expected]
        assert len(parted) <= 2
        for i in parted:
            plan.check_tie(PROMPTS[i], found[i])


def answers(files, settings: dict[str, Any], way: str) -> list[list[list[int]]]:
    """The texts behind all prompts, each time that they are asked for."""
    with serving(files, settings, **WAYS[way]) as engine:
        found = [texts(served(engine, PROMPTS, NEW))]
        if way == "preempted":
            assert metric(engine, "vllm:num_preemptions") > 0
        if way.endswith("from prefixes"):
            again = served(engine, PROMPTS, NEW)
            assert sum(output.num_cached_tokens > 0 for output in again) >= len(PROMPTS) // 2
            found.append(texts(again))
    return found
