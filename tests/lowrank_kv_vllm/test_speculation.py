"""Guessed tokens. Last of all, because vLLM guesses by numba, and once that is loaded starts no further engine here."""

from served_engines import metric, prompt_of, served, serving, texts


def test_guessed_tokens_change_no_text(files):
    piece = prompt_of(9, 5)
    prompts = [piece * 4, prompt_of(40, 6)]
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with serving(files, files.settings, speculative_config=guesses) as engine:
        found = texts(served(engine, prompts, 60))
        assert metric(engine, "vllm:spec_decode_num_draft_tokens") > metric(
            engine, "vllm:spec_decode_num_accepted_tokens"
        )
        assert metric(engine, "vllm:spec_decode_num_accepted_tokens") > 0
    assert found == [files.generated(prompt, 60) for prompt in prompts]
