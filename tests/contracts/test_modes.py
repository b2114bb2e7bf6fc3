"""Every way `generate()` works, with methods of every kind, on a tiny model; and the ways that are refused."""

import copy
import threading

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from methods import PLANNED, TOKENWISE, picked, tiny_model
from transformers import CompileConfig, GenerationConfig, StaticCache, TextIteratorStreamer, pipeline

import dynakv
from lowrank_kv.hf.prepare import restore
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache

PICKED = [
    *picked("dynakv", "ojakv-joint", "ojakv-pf", "ojakv"),
    *PLANNED,
    pytest.param(TOKENWISE, marks=pytest.mark.slow),
]
[DYNAKV], [OJAKV] = picked("dynakv"), picked("ojakv-joint")
every_method = pytest.mark.parametrize("method", PICKED, ids=lambda method: method.name)
PROMPT = 40  # more than a preset keeps at full rank


@pytest.fixture
def ids():
    return torch.randint(1, 97, (2, PROMPT), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def repetitive():
    """A prompt whose n-grams recur, so that looking them up drafts long continuations."""
    return torch.randint(1, 97, (1, 10), generator=torch.Generator().manual_seed(5)).repeat(1, 4)


def generate(model, ids, cache=None, **settings):
    settings = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(ids), **settings}
    return model.generate(ids, past_key_values=cache, **settings)


class Calls:
    """Counts the tokens of each call of a model."""

    def __init__(self, model):
        self.tokens: list[int] = []
        model.register_forward_pre_hook(
            lambda _, args, kwargs: self.tokens.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )


# -- what works --------------------------------------------------------------------------------------------------

SAME_AT_FULL_RANK = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beam_search": {"num_beams": 4},
    "beam_sampling": {"num_beams": 3, "do_sample": True},
    "several_sequences": {"do_sample": True, "num_return_sequences": 3},
    "chunked_prefill": {"prefill_chunk_size": 17},
    "chunked_prefill_in_small_chunks": {"prefill_chunk_size": 7},
}


@torch.no_grad()
@every_method
@pytest.mark.parametrize("mode", SAME_AT_FULL_RANK)
def test_at_full_rank_a_mode_says_what_the_dense_model_says(method, mode, ids):
    model, settings = tiny_model(), SAME_AT_FULL_RANK[mode]
    torch.manual_seed(3)
    dense = generate(model, ids, **settings)
    make_cache = method.build(model, 1.0)
    cache = make_cache()
    torch.manual_seed(3)
    assert torch.equal(generate(model, ids, cache, **settings), dense)
    assert cache.get_seq_length() == PROMPT + 15


@torch.no_grad()
@every_method
@pytest.mark.parametrize("rate", [0.15, 1.0])
def test_a_left_padded_batch_is_its_sequences_alone(method, rate, ids):
    model = tiny_model()
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :9] = 0
    mask[1, :9] = 0
    dense = generate(model, padded, attention_mask=mask)
    make_cache = method.build(model, rate)
    batch = generate(model, padded, make_cache(), attention_mask=mask)
    for row, start in ((0, 0), (1, 9)):
        alone = generate(model, ids[row : row + 1, start:], make_cache())
        assert torch.equal(batch[row, PROMPT:], alone[0, PROMPT - start :])
    assert torch.equal(batch, dense) == (rate == 1.0)


@torch.no_grad()
@every_method
def test_compressed_sampling_repeats_with_its_seed(method, ids):
    model = tiny_model()
    make_cache = method.build(model, 0.3)
    said = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        said.append(generate(model, ids, make_cache(), do_sample=True))
    assert torch.equal(said[0], said[1])
    assert not torch.equal(said[0], said[2])


@torch.no_grad()
@every_method
def test_compressed_beams_do_not_depend_on_the_other_sequences(method, ids):
    model = tiny_model()
    make_cache = method.build(model, 0.3)
    batch = generate(model, ids, make_cache(), num_beams=3)
    for row in range(2):
        assert torch.equal(batch[row : row + 1], generate(model, ids[row : row + 1], make_cache(), num_beams=3))


@torch.no_grad()
@every_method
@pytest.mark.parametrize("rate", [0.15, 1.0])
def test_a_conversation_goes_on_in_the_same_cache(method, rate, ids):
    model = tiny_model()
    more = torch.randint(1, 97, (2, 21), generator=torch.Generator().manual_seed(6))
    dense = generate(model, torch.cat([generate(model, ids), more], dim=1))
    make_cache = method.build(model, rate)
    cache = make_cache()
    first = generate(model, ids, cache)
    assert cache.get_seq_length() == PROMPT + 15
    second = generate(model, torch.cat([first, more], dim=1), cache)
    assert cache.get_seq_length() == PROMPT + 16 + 21 + 15
    if rate == 1.0:
        assert torch.equal(second, dense)
        return
    assert not torch.equal(second, dense)
    # The same calls by hand: nothing was read twice or left out between the turns.
    cache = make_cache()
    token, said = ids, ids
    for turn in (None, more):
        if turn is not None:
            token = torch.cat([token, turn], dim=1)
            said = torch.cat([said, turn], dim=1)
        for _ in range(16):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(dim=-1)
            said = torch.cat([said, token], dim=1)
    assert torch.equal(second, said)


@torch.no_grad()
@every_method
def test_compressed_chunks_equal_the_same_chunks_by_hand(method, ids):
    model = tiny_model()
    make_cache = method.build(model, 0.3)
    said, cache = generate(model, ids, make_cache(), prefill_chunk_size=17), make_cache()
    cache.expect_prompt(ids.shape[1])
    for chunk in ids.split(17, dim=1):
        logits = model(chunk, past_key_values=cache).logits
    for step in range(16):
        token = logits[:, -1:].argmax(dim=-1)
        assert torch.equal(token[:, 0], said[:, PROMPT + step])
        logits = model(token, past_key_values=cache).logits
    if not method.follows_text:
        assert torch.equal(said, generate(model, ids, make_cache())), "chunked = whole where no basis moves"


# -- drafts ------------------------------------------------------------------------------------------------------


def drafting(model):
    """A model that as an assistant drafts five tokens whatever it thinks of them."""
    model.generation_config.num_assistant_tokens = 5
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


@torch.no_grad()
@every_method
@pytest.mark.parametrize("drafted", ["prompt_lookup", "assistant"])
def test_drafts_change_nothing_at_full_rank(method, drafted, repetitive):
    model = tiny_model()
    settings = {"prompt_lookup_num_tokens": 5}
    if drafted == "assistant":
        settings = {"assistant_model": drafting(tiny_model(num_hidden_layers=1))}
    plain = generate(model, repetitive)
    dense = generate(model, repetitive, **settings)
    assert torch.equal(dense, plain)
    make_cache = method.build(model, 1.0)
    calls = Calls(model)
    assert torch.equal(generate(model, repetitive, make_cache(), **settings), plain)
    # The first call has the prompt and drafts; some later ones have several tokens, of which most are taken back.
    assert calls.tokens[0] > PROMPT
    assert max(calls.tokens[1:]) > 2


@torch.no_grad()
def test_dynakv_says_the_same_with_and_without_drafts(repetitive):
    """What DynaKV stores of a token depends on that token alone, so that drafts change nothing at any rate."""
    model = tiny_model()
    dense = generate(model, repetitive)
    DYNAKV.build(model, 0.3)
    plain = generate(model, repetitive)
    assert not torch.equal(plain, dense)
    for settings in ({"prompt_lookup_num_tokens": 5}, {"assistant_model": drafting(tiny_model(num_hidden_layers=1))}):
        assert torch.equal(generate(model, repetitive, **settings), plain)


@torch.no_grad()
@pytest.mark.parametrize(
    "method", [*picked("ojakv-joint", "ojakv-pf"), *PLANNED, TOKENWISE], ids=lambda method: method.name
)
def test_drafts_that_are_all_wrong_change_nothing(method, ids):
    """Drafts that are never accepted leave one token a call, and the prompt's compression one call later: held tokens
    count for nothing, so that what is said is what a cache says that was told to hold its prompt and saw no drafts."""
    model = tiny_model()
    make_cache = method.build(model, 0.3)

    class Wrong:
        """A candidate generator of the kind `generate()` uses, that drafts what the model never says."""

        requires_model_outputs = False

        def get_candidates(self, input_ids, **kwargs):
            return torch.cat([input_ids, torch.full((1, 5), unsaid)], dim=1), None

        def update_candidate_strategy(self, input_ids, scores, num_matches):
            assert num_matches == 0

    ids = ids[:1]
    expected, token, said = make_cache(), ids, []
    expected.activate_past_recording()
    for _ in range(16):
        token = model(token, past_key_values=expected).logits[:, -1:].argmax(dim=-1)
        said.append(int(token))
    unsaid = min(set(range(97)) - set(said))
    model._get_candidate_generator = lambda **kwargs: Wrong()
    cache = make_cache()
    drafted = generate(model, ids, cache, prompt_lookup_num_tokens=5)
    assert drafted[0, PROMPT : PROMPT + 16].tolist() == said
    assert cache.get_seq_length() == expected.get_seq_length()
    if method.name.startswith("ojakv"):
        assert cache.updates == expected.updates > 0


@torch.no_grad()
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_a_compressed_model_assists_a_dense_one(rate, ids):
    """Only what is accepted by the dense model is said; the assistant's own cache is rolled back."""
    model, assistant = tiny_model(), drafting(tiny_model())
    calls = Calls(model)
    dense = generate(model, ids[:1], assistant_model=assistant)
    uncompressed, calls.tokens = calls.tokens, []
    assert torch.equal(dense, generate(tiny_model(), ids[:1]))
    DYNAKV.build(assistant, rate)
    assert torch.equal(generate(model, ids[:1], assistant_model=assistant), dense)
    # At full rank it is right as often as the uncompressed assistant.
    assert (calls.tokens == uncompressed) == (rate == 1.0)


# -- text --------------------------------------------------------------------------------------------------------


def text_model():
    return tiny_model(vocab_size=257, eos_token_id=0)


@every_method
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_streamed_text_is_the_text(method, rate):
    model, tokenizer = text_model(), byte_tokenizer()
    inputs = tokenizer("the cache keeps what later tokens will ask for", return_tensors="pt")
    make_cache = method.build(model, rate)
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    whole = model.generate(**inputs, past_key_values=make_cache(), **settings)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    keywords = {**inputs, **settings, "past_key_values": make_cache(), "streamer": streamer}
    thread = threading.Thread(target=model.generate, kwargs=keywords)
    thread.start()
    pieces = list(streamer)
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert len(pieces) > 1
    assert "".join(pieces) == tokenizer.decode(whole[0, inputs["input_ids"].shape[1] :])


@every_method
def test_a_pipeline_generates_compressed(method):
    """An attached DynaKV model needs nothing; OjaKV's cache is passed on to `generate()`."""
    model, tokenizer = text_model(), byte_tokenizer()
    text = "the cache keeps what later tokens will ask for"
    settings = {"max_new_tokens": 12, "do_sample": False}
    dense = pipeline("text-generation", model=model, tokenizer=tokenizer)(text, **settings)
    make_cache = method.build(model, 0.15)
    inputs = tokenizer(text, return_tensors="pt")
    expected = model.generate(**inputs, past_key_values=make_cache(), pad_token_id=0, **settings)
    passed = {"past_key_values": make_cache()} if method.preset else {}
    said = pipeline("text-generation", model=model, tokenizer=tokenizer)(text, **settings, **passed)
    assert said[0]["generated_text"] == tokenizer.decode(expected[0], skip_special_tokens=True)
    assert said != dense
    if passed:
        assert passed["past_key_values"].get_seq_length() == expected.shape[1] - 1


# -- what is refused ---------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("implementation", ["static", "offloaded", "offloaded_static", "quantized"])
def test_another_cache_beside_a_compressed_one_is_refused(method, implementation, ids):
    model = tiny_model()
    cache = method.build(model, 0.3)()
    with pytest.raises(UserError, match=f"cache_implementation='{implementation}'.*leave it unset"):
        generate(model, ids, cache, cache_implementation=implementation)
    if not method.preset:
        with pytest.raises(UserError, match=f"cache_implementation='{implementation}'.*leave it unset"):
            generate(model, ids, cache_implementation=implementation)
    assert cache.get_seq_length() == 0
    assert generate(model, ids, cache).shape == (2, PROMPT + 16)


@every_method
def test_a_dynamic_cache_is_what_a_compressed_one_is(method, ids):
    model = tiny_model()
    make_cache = method.build(model, 0.3)
    expected = generate(model, ids, make_cache())
    assert torch.equal(generate(model, ids, make_cache(), cache_implementation="dynamic"), expected)
    if not method.preset:
        assert torch.equal(generate(model, ids, cache_implementation="dynamic"), expected)


def test_a_static_cache_object_is_refused_by_a_served_model(ids):
    model = tiny_model()
    DYNAKV.build(model, 0.3)
    with pytest.raises(UserError, match="StaticCache, which would bypass the compressor"):
        generate(model, ids, StaticCache(config=model.config, max_cache_len=80))


def test_a_model_prepared_for_ojakv_still_takes_other_caches(ids):
    model = tiny_model()
    dense = generate(model, ids)
    OJAKV.build(model, 0.3)()
    assert torch.equal(generate(model, ids), dense)
    assert torch.equal(generate(model, ids, cache_implementation="static"), dense)
    assert torch.equal(generate(model, ids, StaticCache(config=model.config, max_cache_len=80)), dense)


@every_method
def test_a_growing_cache_is_not_compiled(method, ids, monkeypatch):
    """`generate()` compiles for static caches alone; a compile_config is passed over for ours, with its own warning."""
    model = tiny_model()
    cache = method.build(model, 0.3)()
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("compiled"))
    assert not cache.is_compileable
    compiled = CompileConfig()
    compiled._compile_all_devices = True
    assert generate(model, ids, cache, compile_config=compiled).shape == (2, PROMPT + 16)


@every_method
def test_continuous_batching_is_refused(method, ids):
    model = tiny_model()
    cache = method.build(model, 0.3)()
    assert isinstance(cache, dynakv.DynaKVCache | OjaKVCache)
    config = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=0)
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(UserError, match="continuous batching .* left-padded batch, or take the compression off"):
            one.generate_batch(ids.tolist(), generation_config=config, progress_bar=False)
        with pytest.raises(UserError, match="continuous batching"):
            generate(one, ids, cache_implementation="paged")


@pytest.mark.parametrize(
    ("method", "take_off"), [(DYNAKV, dynakv.detach), (OJAKV, restore)], ids=["dynakv", "ojakv-joint"]
)
def test_continuous_batching_is_back_with_the_stock_model(method, take_off):
    model = tiny_model()
    method.build(model, 0.3)()
    take_off(model)
    assert not {"init_continuous_batching", "_prepare_cache_for_generation"} & model.__dict__.keys()
    assert model.config._attn_implementation == "sdpa"
