"""vLLM with compressed pages: the texts of `generate()`, however the scheduler divides the work."""

import pytest
from served_engines import BATCHED, BLOCK, MEMORY, attentions, prompt_of, served, serving, texts


@pytest.fixture(scope="module")
def engine(files):
    with serving(files, files.settings) as engine:
        yield engine


@pytest.mark.parametrize("count", [1, 16])
def test_a_batch_says_what_generate_says(engine, files, count):
    prompts = [prompt_of(3 + i % 8, i) for i in range(count)]  # which one step can read
    assert texts(served(engine, prompts)) == [files.generated(prompt) for prompt in prompts]


def test_a_chunked_prompt_and_a_prefix_hit_read_earlier_tokens_from_pages(engine, files):
    prompt = prompt_of(150, 1)
    expected = files.generated(prompt)
    [first] = served(engine, [prompt])
    [again] = served(engine, [prompt])
    assert not first.num_cached_tokens
    assert again.num_cached_tokens == 150 // BLOCK * BLOCK == BATCHED  # so that both read the same tokens anew
    assert texts([first, again]) == [expected, expected]


@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_may_begin_with_a_single_token(engine, files, seed):
    """The step that another prompt nearly fills has one token left for it: it holds a sink, and no rows."""
    first, second = prompt_of(BATCHED - 1, 60 + seed), prompt_of(50, 70 + seed)
    expected = [files.generated(first), files.generated(second, chunk=[1, 49])]
    assert texts(served(engine, [first, second])) == expected


def test_what_aborted_requests_leave_harms_nobody(engine, files):
    from vllm import SamplingParams

    core, prompts = engine.llm_engine, [prompt_of(20 + i, 40 + i) for i in range(4)]
    for i, prompt in enumerate(prompts):
        options = SamplingParams(temperature=0, max_tokens=24, detokenize=False, ignore_eos=True)
        core.add_request(str(i), {"prompt_token_ids": prompt}, options)
    found = {}
    for step in range(60):
        if step == 5:
            core.abort_request(["0", "2"])
        for output in core.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
    assert found == {str(i): files.generated(prompts[i]) for i in (1, 3)}
    assert not core.has_unfinished_requests()
    assert texts(served(engine, prompts)) == [files.generated(prompt) for prompt in prompts]


def test_the_scheduler_counts_the_bytes_of_pages(engine):
    page_bytes = sum(attention.impl.layout(BLOCK).page_bytes for attention in attentions(engine))
    config = engine.llm_engine.vllm_config.cache_config
    assert config.num_gpu_blocks == MEMORY // page_bytes


def test_what_is_not_compiled_calls_attention_without_an_operator(engine):
    assert all(attention.use_direct_call for attention in attentions(engine))
