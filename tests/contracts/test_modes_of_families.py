"""Mode × family × method: every way to generate, on every family, says at full rank what the uncompressed model says."""

import functools
import threading

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from families import BY_NAME, FAMILIES, RECURRENT
from methods import PLANNED, TOKENWISE, picked
from old_transformers import skip_what_it_gets_wrong
from transformers import TextIteratorStreamer, pipeline

QUICK = picked("dynakv", "ojakv-joint", "ojakv-pf", "joint-mixed")
# Without bits the other plans are bases of one layer that stay as they are; `test_families.py` is quick with a learned one.
SLOW = [method for method in (*PLANNED, TOKENWISE) if method not in QUICK]
CASES = [
    *((method, family) for method in QUICK for family in FAMILIES),
    # What a method does with its layers is the same beside recurrent ones.
    *((QUICK[0], family) for family in RECURRENT),
    *(pytest.param(method, family, marks=pytest.mark.slow) for method in SLOW for family in FAMILIES + RECURRENT),
    *(pytest.param(QUICK[-1], family, marks=pytest.mark.slow) for family in RECURRENT),
]
VOCABULARY, PROMPT, NEW = 257, 20, 12


def generate(model, ids, cache, **settings):
    settings = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids), **settings}
    return model.generate(ids, past_key_values=cache, **settings)


def sampled(model, ids, cache, **settings):
    torch.manual_seed(3)
    return generate(model, ids, cache, do_sample=True, **settings)


def left_padded(model, ids, cache):
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    return generate(model, ids * mask, cache, attention_mask=mask)


def conversation(model, ids, cache):
    first = generate(model, ids, cache)
    return generate(model, torch.cat([first, ids[:, :9]], dim=1), cache)


def prompt_lookup(model, ids, cache):
    return generate(model, ids[:1, :10].repeat(1, 3), cache, prompt_lookup_num_tokens=5)


def assisted(model, ids, cache):
    family = next(family for family in BY_NAME.values() if family.model_class is type(model))
    assistant = family.model(vocab_size=VOCABULARY)
    # Wrong now and then, so that drafts are taken back.
    generator = torch.Generator().manual_seed(1)
    for parameter in assistant.parameters():
        parameter.data += 0.05 * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return generate(model, ids[:1], cache, assistant_model=assistant)


def streamed(model, ids, cache):
    streamer = TextIteratorStreamer(byte_tokenizer(), skip_prompt=True, timeout=60)
    thread = threading.Thread(target=generate, args=(model, ids[:1], cache), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    return text


def piped(model, ids, cache):
    pipe = pipeline("text-generation", model=model, tokenizer=byte_tokenizer(), device="cpu")
    given = {} if cache is None else {"past_key_values": cache}
    settings = {"max_new_tokens": NEW, "do_sample": False, "stop_sequence": "q", **given}
    return pipe("the cache keeps what later tokens ask for", **settings)


def until_a_letter(model, ids, cache):
    letters = [chr(code) for code in range(100, 128)]
    return generate(model, ids[:1], cache, stop_strings=letters, tokenizer=byte_tokenizer())


MODES = {
    "greedy": generate,
    "sampling": sampled,
    "beam_search": lambda model, ids, cache: generate(model, ids, cache, num_beams=3),
    "several_sequences": lambda model, ids, cache: sampled(model, ids, cache, num_return_sequences=2),
    "left_padded_batch": left_padded,
    "conversation": conversation,
    "chunked_prefill": lambda model, ids, cache: generate(model, ids, cache, prefill_chunk_size=8),
    "prompt_lookup": prompt_lookup,
    "assisted": assisted,
    "streaming": streamed,
    "stop_strings": until_a_letter,
    "pipeline": piped,
}


def prompt():
    return torch.randint(1, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(5))


@functools.cache
def uncompressed(name, mode):
    """What the model says by itself, which every method is compared with."""
    return MODES[mode](BY_NAME[name].model(vocab_size=VOCABULARY), prompt(), None)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:You seem to be using the pipelines sequentially")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("method", "family"), CASES, ids=lambda each: each.name)
def test_a_mode_says_what_the_uncompressed_model_says(method, family, mode):
    ids = prompt()
    model = family.model(vocab_size=VOCABULARY)
    if model._is_stateful and mode in ("prompt_lookup", "assisted"):
        with pytest.raises(ValueError, match="not supported with stateful models"):  # by transformers, with any cache
            MODES[mode](model, ids, method.build(model, 1.0)())
        return
    if mode == "assisted" and family.name in ("gemma2", "gemma3"):
        skip_what_it_gets_wrong("the mask of an assistant with sliding windows")
    dense = uncompressed(family.name, mode)
    cache = method.build(model, 1.0)()
    said = MODES[mode](model, ids, cache)
    assert torch.equal(said, dense) if isinstance(dense, torch.Tensor) else said == dense
    # It was this cache that was read and filled.
    assert cache.get_seq_length() > PROMPT
