"""The texts of `generate()` after preemption, from a compiled model, and however a prompt is divided."""

import copy
from typing import Any

import torch
from served_engines import attentions, metric, prompt_of, served, serving, texts
from vllm.v1.metrics.stats import PrefixCacheStats


def test_requests_that_were_preempted_go_on_as_they_began(files):
    prompts = [prompt_of(18 + i, i) for i in range(6)]  # which one step can read
    with serving(files, files.settings, num_gpu_blocks_override=10, enable_prefix_caching=False) as engine:
        found = texts(served(engine, prompts, 60))
        assert metric(engine, "vllm:num_preemptions") > 0
    assert found == [files.generated(prompt, 60) for prompt in prompts]


def test_a_preempted_request_reads_what_its_pages_kept_of_it(files, monkeypatch):
    """With prefixes cached, as they are by default, it finds pages of its prompt, and of what it generated."""
    hits, record = [], PrefixCacheStats.record  # no metric has those of preempted requests

    def counted(stats: PrefixCacheStats, num_tokens: int, num_hits: int, preempted: bool, **more: Any) -> None:
        hits.append(num_hits * preempted)
        record(stats, num_tokens, num_hits, preempted, **more)

    monkeypatch.setattr(PrefixCacheStats, "record", counted)
    prompts = [prompt_of(70 + i, i) for i in range(3)]
    settings = {**files.settings, "prefill": "reconstructed"}
    with serving(files, settings, num_gpu_blocks_override=10) as engine:
        found = texts(served(engine, prompts, 60))
    assert max(hits) > 0
    assert found == [files.generated(prompt, 60, prefill="reconstructed") for prompt in prompts]


def test_a_compiled_model_says_the_same(files):
    prompts = [prompt_of(length, length) for length in (5, 40, 80)]
    with serving(files, files.settings, enforce_eager=False) as engine:
        found = texts(served(engine, prompts))
        assert engine.llm_engine.vllm_config.compilation_config.mode
        assert not any(attention.use_direct_call for attention in attentions(engine))
    assert found == [files.generated(prompt) for prompt in prompts]


def test_with_rebuilt_prompts_no_text_depends_on_how_its_prompt_is_read(files):
    prompts, settings = [prompt_of(length, 3) for length in (200, 150, 31)], {"prefill": "reconstructed"}
    expected = [files.generated(prompt, chunk=256, **settings) for prompt in prompts]
    with serving(files, {**files.settings, **settings}, max_num_batched_tokens=48) as engine:
        assert texts(served(engine, prompts)) == expected
        again = served(engine, prompts)
    assert any(output.num_cached_tokens for output in again)
    assert texts(again) == expected


def test_static_plans(files):
    prompts = [prompt_of(length, length) for length in (5, 40, 80)]
    settings = {"preset": "static-mixed", "page_margin": None}
    with serving(files, {**files.settings, **settings}) as engine:
        found = texts(served(engine, prompts))
    assert found == [files.generated(prompt, **settings) for prompt in prompts]


@torch.no_grad()
def test_in_bfloat16_predictions_are_as_near_as_bfloat16_allows(files):
    prompts, settings = [prompt_of(length, length) for length in (7, 30, 60, 90)], {"prefill": "reconstructed"}
    with serving(files, {**files.settings, **settings}, dtype="bfloat16", max_logprobs=-1) as engine:
        outputs = served(engine, prompts, 8, logprobs=-1)
    exact, half = files.model, copy.deepcopy(files.model).bfloat16()
    found, rounding = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        expected, other = (
            predictions(model, files.cache(model, **settings), prompt, tokens) for model in (half, exact)
        )
        for place, step in enumerate(output.outputs[0].logprobs):
            said_V = torch.tensor([step[token].logprob for token in range(257)])
            found.append(divergence(expected[place], said_V))
            rounding.append(divergence(other[place], expected[place]))
    assert sum(found) / len(found) <= max(1e-3, sum(rounding) / len(rounding))


def predictions(model, cache, prompt: list[int], tokens: list[int]) -> list[torch.Tensor]:
    """Logarithms of the probabilities of each of these tokens' places."""
    logits = model(input_ids=torch.tensor([prompt]), past_key_values=cache).logits[0, -1:]
    found = [logits]
    for token in tokens[:-1]:
        found.append(model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, -1:])
    return list(torch.cat(found).float().log_softmax(dim=-1))


def divergence(expected_V: torch.Tensor, found_V: torch.Tensor) -> float:
    """KL, in nats."""
    return float((expected_V.exp() * (expected_V - found_V)).sum())
