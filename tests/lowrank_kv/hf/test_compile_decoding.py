"""`compile_decoding`: which calls run compiled, what of them is rewritten, and that nothing said changes."""

import copy
import pickle
import shutil

import pytest
import torch
from families import FAMILIES
from methods import METHODS, calibration_of, tiny_model
from threads import threads_of
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, StaticCache, T5Config, T5ForConditionalGeneration

import lowrank_kv
from lowrank_kv.hf import compile_decoding as compiled
from lowrank_kv.hf.compile_decoding import compile_decoding
from lowrank_kv.utils.errors import UserError

DYNAKV, OJAKV, JOINT = (
    next(method for method in METHODS if method.name == name) for name in ("dynakv", "ojakv-pf", "joint-mixed")
)
all_kinds = pytest.mark.parametrize("method", [DYNAKV, OJAKV, JOINT], ids=lambda method: method.name)
needs_cxx = pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="inductor needs a C++ compiler")
STEPS = 4


class Graphs(list):
    """The graphs that were handed to inductor, which run as they are instead."""

    def targets(self):
        return [node.target for graph in self for node in graph.graph.nodes]


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()


@pytest.fixture
def graphs(monkeypatch):
    found = Graphs()

    def run_as_it_is(graph, _inputs):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "lookup_backend", lambda _name: run_as_it_is)
    return found


@pytest.fixture
def ids():
    return torch.randint(1, 97, (1, 24), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def decoded(model, ids, cache, steps=STEPS):
    model(ids, past_key_values=cache)
    token = torch.full((len(ids), 1), 5)
    return torch.cat([model(token, past_key_values=cache).logits for _ in range(steps)], dim=1)


@torch.no_grad()
def test_compiled_tokens_read_the_cache_of_a_plain_call(ids, graphs, recwarn):
    """So that two prompts, each with tokens behind it, are not taken for two texts that are scored."""
    model = tiny_model(num_hidden_layers=2)
    lowrank_kv.compress(model, "tokenwise-mixed", rate=0.5, bases=calibration_of(model, read=True))
    compile_decoding(model)
    for _ in range(3):
        cache = model(ids).past_key_values
        model(ids[:, :1], past_key_values=cache)
    assert graphs
    assert not [each for each in recwarn if "two calls in a row" in str(each.message)]


@all_kinds
def test_only_decoded_tokens_run_compiled_and_one_graph_serves_them_all(method, ids, graphs):
    model = tiny_model(num_hidden_layers=2)
    make_cache = method.build(model, 0.5)
    expected = decoded(model, ids, make_cache())
    assert compile_decoding(model) is model
    cache = make_cache()
    with torch.no_grad():
        model(ids)
        model(ids[:, :1], past_key_values=make_cache())
        model(ids, past_key_values=cache)
        model(ids[:, :3], past_key_values=cache)
    assert not graphs
    assert torch.allclose(decoded(model, ids, make_cache()), expected, atol=1e-5)
    assert len(graphs) == 1
    decoded(model, ids[:, :9], make_cache(), steps=40)
    assert len(graphs) == 1


@pytest.mark.parametrize("other", [DynamicCache, StaticCache], ids=lambda other: other.__name__)
def test_a_prepared_model_decodes_with_uncompressed_caches_too(other, ids, graphs):
    model = tiny_model(num_hidden_layers=2)
    make_compressed = OJAKV.build(model, 0.5)

    def make_cache():
        return other(config=model.config) if other is DynamicCache else other(config=model.config, max_cache_len=64)

    expected = decoded(model, ids, make_cache()), decoded(model, ids, make_compressed())
    compile_decoding(model)
    said = decoded(model, ids, make_cache()), decoded(model, ids, make_compressed())
    for one, another in zip(said, expected, strict=True):
        torch.testing.assert_close(one, another, atol=1e-5, rtol=0)
    assert len(graphs) == 2


def test_any_number_of_sequences_and_models_has_its_graphs(ids, graphs):
    """More graphs than the eight that torch keeps of one code: of three models, of one sequence and several, with padding
    and without (which transformers up to 5.17 does not tell apart)."""
    for method in (DYNAKV, OJAKV, OJAKV):
        model = tiny_model(num_hidden_layers=1)
        make_cache = method.build(model, 0.5)

        def written(rows, padding, model=model, make_cache=make_cache):
            batch = ids.repeat(rows, 1)
            mask = torch.ones_like(batch)
            mask[-1:, :padding] = 0
            given = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            return model.generate(batch, past_key_values=make_cache(), **given)

        kinds = [(rows, padding) for rows in (1, 2, 5) for padding in (0, 7)]
        expected = [written(*kind) for kind in kinds]
        compile_decoding(model)
        graphs.clear()
        counts = []
        for kind, said in zip(kinds, expected, strict=True):
            assert torch.equal(written(*kind), said)
            counts.append(len(graphs))
        assert counts in ([1, 2, 3, 4, 4, 4], [1, 1, 2, 2, 2, 2])


def test_a_token_given_by_name_or_as_an_embedding_is_decoded_too(ids, graphs):
    model = tiny_model(num_hidden_layers=2)
    cache = DynamicCache(config=model.config)
    expected = decoded(model, ids, DynamicCache(config=model.config), steps=2)
    compile_decoding(model)
    token = torch.full((1, 1), 5)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        first = model(input_ids=token, past_key_values=cache).logits
        second = model(inputs_embeds=model.get_input_embeddings()(token), past_key_values=cache).logits
    assert len(graphs) == 2
    assert torch.allclose(torch.cat([first, second], dim=1), expected, atol=1e-5)


def test_training_runs_as_before(ids, graphs):
    model = compile_decoding(tiny_model(num_hidden_layers=2))
    model.train()
    model(ids, labels=ids, past_key_values=DynamicCache(config=model.config)).loss.backward()
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    model(ids[:, :1], past_key_values=cache).logits.sum().backward()
    assert not graphs
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_ninth_graph_of_a_kind_takes_the_place_of_eight(ids, graphs):
    model = compile_decoding(tiny_model(num_hidden_layers=1))
    for count in range(1, 11):
        with threads_of(count):  # torch makes a graph for a number of threads
            decoded(model, ids, DynamicCache(config=model.config))
        assert len(graphs) == count


@all_kinds
def test_under_autocast_a_compiled_token_has_the_dtype_of_any(method, ids, graphs):
    model = tiny_model(num_hidden_layers=2)
    make_cache = method.build(model, 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = decoded(model, ids, make_cache())
        said = decoded(compile_decoding(model), ids, make_cache())
    assert compiled._one_row in graphs.targets()
    assert said.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(said, expected, atol=0.1, rtol=0)  # sums of fp32 weights, not of rounded ones


def test_fp64_stays_with_the_library(ids, graphs):
    model = tiny_model(num_hidden_layers=2).double()
    expected = decoded(model, ids, DynamicCache(config=model.config))
    said = decoded(compile_decoding(model), ids, DynamicCache(config=model.config))
    torch.testing.assert_close(said, expected, atol=1e-12, rtol=0)


def test_what_would_run_uncompiled_all_the_same_is_refused():
    with pytest.raises(UserError, match="got a DataParallel; pass the model it wraps"):
        compile_decoding(nn.DataParallel(tiny_model()))
    with pytest.raises(UserError, match="got a str; load one with `AutoModelForCausalLM.from_pretrained"):
        compile_decoding("gpt2")
    settings = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 97}
    with pytest.raises(UserError, match="must be a decoder, got a T5ForConditionalGeneration"):
        compile_decoding(T5ForConditionalGeneration(T5Config(**settings)))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_product_of_one_row_is_a_sum(family, ids, graphs):
    model = family.model()
    make_cache = DYNAKV.build(model, 0.5)
    expected = decoded(model, ids, make_cache())
    assert torch.allclose(decoded(compile_decoding(model), ids, make_cache()), expected, atol=1e-5)
    targets = graphs.targets()
    assert compiled._one_row in targets
    assert functional.linear not in targets


def test_products_of_several_rows_are_left_to_the_library(ids, graphs):
    model = tiny_model(num_hidden_layers=2)
    make_cache = DYNAKV.build(model, 0.5)
    ids = torch.cat([ids, ids.flip(1)])
    expected = decoded(model, ids, make_cache())
    assert torch.equal(decoded(compile_decoding(model), ids, make_cache()), expected)
    assert compiled._one_row not in graphs.targets()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5,), (1, 5), (1, 1, 5)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_sum_is_the_product(shape, has_bias, dtype):
    torch.manual_seed(0)
    row, weight, bias = torch.randn(shape), torch.randn(7, 5), torch.randn(7) if has_bias else None
    row, weight, bias = (None if each is None else each.to(dtype) for each in (row, weight, bias))
    said = compiled._one_row(row, weight, bias, dtype=dtype)
    expected = functional.linear(*(None if each is None else each.double() for each in (row, weight, bias)))
    assert said.dtype == dtype
    assert said.shape == expected.shape
    torch.testing.assert_close(said.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_copies_are_not_compiled_and_speak_for_themselves(ids, graphs):
    model = compile_decoding(tiny_model(num_hidden_layers=2))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin.lm_head.weight.mul_(2)
        said = decoded(twin, ids, DynamicCache(config=twin.config))
        assert not graphs
        assert not torch.equal(said, decoded(model, ids, DynamicCache(config=model.config)))
        graphs.clear()


@needs_cxx
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inductor_decodes_with_every_cache(dtype, ids):
    model = tiny_model(num_hidden_layers=2).to(dtype)
    make_caches = [
        lambda: DynamicCache(config=model.config),
        lambda: StaticCache(config=model.config, max_cache_len=64),
    ]
    expected = [decoded(model, ids, make_cache()) for make_cache in make_caches]
    learned = copy.deepcopy(model)
    make_learned = DYNAKV.build(learned, 0.5)
    expected_learned = decoded(learned, ids, make_learned())
    compile_decoding(model)
    said = [decoded(model, ids, make_cache()) for make_cache in make_caches]
    said.append(decoded(compile_decoding(learned), ids, make_learned()))
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for one, another in zip(said, [*expected, expected_learned], strict=True):
        torch.testing.assert_close(one, another, atol=tolerance, rtol=0)


@needs_cxx
def test_graphs_hold_no_weights_even_where_inductor_would_freeze_them(ids):
    model = compile_decoding(tiny_model(num_hidden_layers=2))
    with torch._inductor.config.patch(freezing=True):
        before = decoded(model, ids, DynamicCache(config=model.config))
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        after = decoded(model, ids, DynamicCache(config=model.config))
    torch.testing.assert_close(after, 2 * before, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_cache_of_another_model_is_refused_in_a_graph_too(ids, graphs):
    models = [tiny_model(seed) for seed in (0, 1)]
    caches = []
    for model in models:
        cache = OJAKV.build(model, 0.5)()
        model(ids, past_key_values=cache)
        caches.append(cache)
    compile_decoding(models[1])
    models[1](ids[:, :1], past_key_values=caches[1])
    with pytest.raises(UserError, match="is a cache of another model"):
        models[1](ids[:, :1], past_key_values=caches[0])
