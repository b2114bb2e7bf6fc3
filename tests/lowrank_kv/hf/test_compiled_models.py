"""`torch.compile` of a model with a compressed cache: a decoded token is one graph, which says what the model says."""

import copy
import pickle
import shutil
import threading

import pytest
import torch
from families import FAMILIES
from methods import METHODS, tiny_model

import dynakv
from lowrank_kv.hf import compile_decoding as compiled
from lowrank_kv.hf import compiled_ops as graph
from lowrank_kv.hf.compile_decoding import compile_decoding
from lowrank_kv.utils.errors import UserError

OPERATIONS = (graph.cache_in_graph, graph.attend_in_graph)
STEPS = 4
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
DYNAKV, OJAKV = (next(method for method in METHODS if method.name == name) for name in ("dynakv", "ojakv-pf"))
both_methods = pytest.mark.parametrize("method", [DYNAKV, OJAKV], ids=lambda method: method.name)
needs_cxx = pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()


@pytest.fixture
def ids():
    return torch.randint(1, 97, (2, 24), generator=torch.Generator().manual_seed(0))


def graph_of(model, backend="eager"):
    """A model compiled so that a break of its graph is an error."""
    return torch.compile(model, fullgraph=True, backend=backend)


@torch.no_grad()
def prompt_read(model, ids, cache, **keywords):
    model(ids, past_key_values=cache, **keywords)
    return cache


@torch.no_grad()
def decoded(model, cache, rows=2):
    token = torch.full((rows, 1), 5)
    return torch.cat([model(token, past_key_values=cache).logits for _ in range(STEPS)], dim=1)


def overwriting(gm, _inputs):
    """A backend that, as inductor may, writes over all that an operation was passed as soon as it is done."""

    def called(operation):
        def call(*arguments):
            passed = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
            output = operation(*passed)
            for each in passed:
                if isinstance(each, torch.Tensor):
                    each.fill_(float("nan") if each.is_floating_point() else 0)
            return output

        return call

    replaced = [node for node in gm.graph.nodes if node.target in OPERATIONS]
    for node in replaced:
        node.target = called(node.target)
    assert replaced
    gm.recompile()
    return gm


@every_method
def test_a_decoded_token_is_one_graph_that_leaves_nothing_behind(method, ids):
    model = tiny_model(num_hidden_layers=2)
    make_cache = method.build(model, 0.5)
    expected_cache, cache = (prompt_read(model, ids, make_cache()) for _ in range(2))
    expected = decoded(model, expected_cache)
    assert torch.equal(decoded(graph_of(model, overwriting), cache), expected)
    assert cache.get_seq_length() == ids.shape[1] + STEPS
    assert cache.nbytes == expected_cache.nbytes


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_decodes_in_one_graph(family, ids):
    model = family.model()
    make_cache = DYNAKV.build(model, 0.5)
    expected = decoded(model, prompt_read(model, ids, make_cache()))
    said = decoded(graph_of(model), prompt_read(model, ids, make_cache()))
    assert torch.allclose(said, expected, atol=1e-5)  # layers with another cache are compiled, too


@needs_cxx
@pytest.mark.parametrize(
    ("method", "dynamic"),
    [(DYNAKV, None), (DYNAKV, True), (OJAKV, True)],
    ids=["dynakv", "dynakv-dynamic", "ojakv-pf-dynamic"],
)
def test_inductor_says_what_the_model_says(method, dynamic, ids):
    model = tiny_model(num_hidden_layers=2)
    make_cache = method.build(model, 0.5)
    expected = decoded(model, prompt_read(model, ids, make_cache()))
    cache = prompt_read(model, ids, make_cache())
    said = decoded(torch.compile(model, fullgraph=True, dynamic=dynamic), cache)
    assert torch.allclose(said, expected, atol=1e-4)


@pytest.mark.parametrize(
    "mode",
    [{"padded": 7}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}],
    ids=lambda mode: next(iter(mode)),
)
@pytest.mark.parametrize(
    "compile_model", [lambda model: model.compile(backend="eager"), compile_decoding], ids=["all", "decoding"]
)
@both_methods
def test_a_compiled_model_generates_the_same(method, compile_model, mode, ids, monkeypatch):
    monkeypatch.setattr(compiled, "lookup_backend", lambda _name: torch._dynamo.lookup_backend("eager"))
    model, settings = (
        tiny_model(num_hidden_layers=2),
        {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **mode},
    )
    make_cache = method.build(model, 0.5)
    ids = ids[:1, :12].repeat(1, 2) if "prompt_lookup_num_tokens" in mode else ids
    mask = torch.ones_like(ids)
    mask[1:, : settings.pop("padded", 0)] = 0

    def written():
        torch.manual_seed(1)
        return model.generate(ids * mask, attention_mask=mask, past_key_values=make_cache(), **settings)

    expected = written()
    compile_model(model)
    assert torch.equal(written(), expected)


@both_methods
def test_a_text_may_begin_with_a_single_token(method, ids):
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    expected = decoded(model, make_cache())
    assert torch.equal(decoded(torch.compile(model, backend="eager"), make_cache()), expected)


@both_methods
def test_a_graph_serves_each_cache_and_each_copy_alone(method, ids):
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    compiled = graph_of(model)
    cache = prompt_read(model, ids, make_cache())
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    expected = decoded(compiled, cache)
    for each in copies:
        assert each.get_seq_length() == ids.shape[1]
        assert torch.equal(decoded(compiled, each), expected)
    assert cache.get_seq_length() == ids.shape[1] + STEPS
    another = prompt_read(model, ids.flip(1), make_cache())
    assert torch.equal(decoded(compiled, another), decoded(model, prompt_read(model, ids.flip(1), make_cache())))


def test_a_copied_model_is_compiled_for_itself(ids):
    model = tiny_model()
    expected = decoded(model, prompt_read(model, ids, DYNAKV.build(model, 0.5)()))
    twin = copy.deepcopy(model)
    del model
    assert torch.equal(decoded(graph_of(twin), prompt_read(twin, ids, dynakv.DynaKVCache.from_model(twin))), expected)


@both_methods
def test_threads_decode_with_one_graph(method, ids):
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    texts = [ids, ids.flip(1)]
    expected = [decoded(model, prompt_read(model, text, make_cache())) for text in texts]
    compiled = graph_of(model)
    decoded(compiled, prompt_read(model, ids, make_cache()))
    caches = [prompt_read(model, text, make_cache()) for text in texts]
    results: dict[int, torch.Tensor] = {}

    def run(thread: int) -> None:
        results[thread] = decoded(compiled, caches[thread])

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[thread], expected[thread]) for thread in range(2))


@both_methods
def test_a_mask_that_weighs_is_refused_before_anything_is_cached(method, ids):
    model = tiny_model()
    cache = prompt_read(model, ids[:1], method.build(model, 0.5)())
    mask = torch.full((1, 1, 1, ids.shape[1] + 1), -0.5)
    with pytest.raises(UserError, match="it can hide tokens, not weigh them"), torch.no_grad():
        graph_of(model)(torch.full((1, 1), 5), past_key_values=cache, attention_mask=mask)
    assert {layer.get_seq_length() for layer in cache.layers} == {ids.shape[1]}


@both_methods
@pytest.mark.parametrize(
    ("keyword", "message", "stored"),
    [
        ({"score_bias": torch.ones(1)}, "passes `score_bias` to its attention", 1),
        ({"is_causal": False}, "passes `is_causal` to its attention", 1),
        ({"cu_seq_lens_q": torch.tensor([0, 1])}, "packs several texts into one sequence", 0),
    ],
    ids=["unknown", "not causal", "packed"],
)
def test_a_keyword_that_attention_would_leave_out_is_refused_in_a_graph_too(method, keyword, message, stored, ids):
    model = tiny_model()
    cache = prompt_read(model, ids, method.build(model, 0.5)())
    with pytest.raises(UserError, match=message), torch.no_grad():
        graph_of(model)(ids[:, :1], past_key_values=cache, **keyword)
    assert cache.layers[0].get_seq_length() == ids.shape[1] + stored


def test_an_unprepared_model_is_refused_in_a_graph(ids):
    prepared = tiny_model()
    cache = prompt_read(prepared, ids, OJAKV.build(prepared, 0.5)())
    with pytest.raises(UserError, match="a model that is not compressed; call"):
        decoded(torch.compile(tiny_model(), backend="eager"), cache)
