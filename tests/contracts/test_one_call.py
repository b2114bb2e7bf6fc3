"""`lowrank_kv.compress`: every method through the one call is the method through its own entry."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from methods import METHODS, calibration_of, dynakv_model, tiny_model
from transformers import DynamicCache

import dynakv
import lowrank_kv
from lowrank_kv.utils.errors import UserError
from ojakv import Calibration, OjaKVCache

IDS = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(5))
RATE = 0.4


def generate(model, **kwargs):
    return model.generate(
        IDS,
        attention_mask=torch.ones_like(IDS),
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )


def compress(model, method, directory):
    """The row put on `model` by the one call; a compressor comes from a checkpoint."""
    if method.preset:
        bases = method.calibration(model, RATE)
        return lowrank_kv.compress(model, method.preset, bases=bases, **method.settings(RATE))
    trained = tiny_model()
    method.build(trained, RATE)
    dynakv.save_compressor(trained, directory)
    return lowrank_kv.compress(model, directory)


@pytest.fixture
def bases(tmp_path):
    directory = tmp_path / "bases"
    calibration_of(tiny_model(), read=True).save(directory, model="", text=[])
    return directory


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_one_call_equals_the_methods_own_entry_and_comes_off(method, tmp_path):
    own = tiny_model()
    expected = generate(own, past_key_values=method.build(own, RATE)())
    model, stock = tiny_model(), generate(tiny_model())
    attention = model.config._attn_implementation

    assert compress(model, method, tmp_path / "checkpoint") is model
    found = generate(model)
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
    assert type(found.past_key_values) is type(expected.past_key_values)
    assert found.past_key_values.memory().kinds == expected.past_key_values.memory().kinds
    with torch.no_grad():  # also without generate()
        assert type(model(IDS).past_key_values) is type(expected.past_key_values)

    assert lowrank_kv.uncompress(model) is model
    assert model.config._attn_implementation == attention
    plain = generate(model)
    assert type(plain.past_key_values) is DynamicCache
    assert torch.equal(torch.stack(plain.logits), torch.stack(stock.logits))


def test_each_text_has_a_cache_of_its_own(bases):
    model = lowrank_kv.compress(tiny_model(), "ojakv-joint", rate=RATE, bases=bases)
    first, second = generate(model), generate(model)
    assert first.past_key_values is not second.past_key_values
    assert torch.equal(torch.stack(first.logits), torch.stack(second.logits))


def test_a_compressed_model_changes_to_another_method(bases, tmp_path):
    model, trained = tiny_model(), tiny_model()
    row = next(method for method in METHODS if method.name == "dynakv")
    row.build(trained, RATE)
    dynakv.save_compressor(trained, tmp_path / "checkpoint")
    rates = []
    for rate in (0.4, 0.8):
        lowrank_kv.compress(model, "tokenwise-mixed", rate=rate, bases=bases, recent_window=0, update_period=1)
        rates.append(generate(model).past_key_values.rate)
    assert rates[0] < rates[1]
    lowrank_kv.compress(model, tmp_path / "checkpoint", eviction={"keep_ratio": 0.5})
    assert type(generate(model).past_key_values) is dynakv.DynaKVCache
    lowrank_kv.compress(model, bases)
    assert type(generate(model).past_key_values) is OjaKVCache
    assert not dynakv.is_attached(model)


@pytest.mark.parametrize(("read", "bits"), [(True, "mixed"), (False, "model")])
def test_a_calibration_names_its_best_preset(read, bits, tmp_path):
    calibration_of(tiny_model(), read=read).save(tmp_path / "bases", model="", text=[])
    cache = generate(lowrank_kv.compress(tiny_model(), tmp_path / "bases", rate=RATE)).past_key_values
    assert cache.compressed_layers()[0].config.cache_dtype == bits


def test_a_model_without_gradients_of_its_own_trains_as_before(bases):
    model = lowrank_kv.compress(tiny_model(), "ojakv-joint", bases=bases).train()
    stock = tiny_model().train()
    for each in (model, stock):
        each(IDS, labels=IDS).loss.backward()
    assert torch.equal(model.lm_head.weight.grad, stock.lm_head.weight.grad)


def test_a_prompt_that_is_read_exactly_has_the_gradients_of_the_stock_model(bases):
    model, stock = lowrank_kv.compress(tiny_model(), "ojakv-joint", bases=bases), tiny_model()
    for each in (model, stock):
        each(IDS, labels=IDS).loss.backward()
    for weight, expected in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected.grad)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_backward_pass_through_the_cache_is_refused(method):
    """Compiled code keeps no graph, so that gradients would go around attention without a word."""
    model = tiny_model()
    cache = method.build(model, RATE)()
    with torch.no_grad():
        cache = model(IDS.repeat(1, 8), past_key_values=cache).past_key_values
    logits = model(IDS[:, :1], past_key_values=cache).logits
    with pytest.raises(UserError, match="has no gradients; read the whole text in one call with `use_cache=False`"):
        logits.sum().backward()


@pytest.mark.parametrize("compiled", [False, True], ids=["uncompiled", "compiled"])
@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj"])
def test_a_backward_pass_to_any_of_attentions_inputs_is_refused(trained, compiled):
    """The last layer alone is trained: nothing behind its cache tells that a gradient is missing."""
    model = tiny_model().requires_grad_(False)
    cache = dynakv_model(model, RATE)()
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    last = model.model.layers[-1]
    getattr(last.self_attn, trained).requires_grad_(True)
    last.mlp.requires_grad_(True)
    forward = torch.compile(model.forward, backend="aot_eager") if compiled else model.forward
    loss = forward(IDS[:, :1], past_key_values=cache).logits.square().mean()
    with pytest.raises(UserError, match="has no gradients; read the whole text in one call"):
        loss.backward()


@pytest.mark.parametrize("settings", [{}, {"cache_dtype": "int8"}, {"mask": "soft_prefix"}], ids=str)
def test_a_backward_pass_through_a_rebuilt_prompt_is_refused(settings):
    """Where compiled code encodes it keys and values would have no gradients, and queries some."""
    model = tiny_model()
    cache = dynakv_model(model, RATE, prefill="reconstructed", **settings)()
    loss = model(IDS, labels=IDS, past_key_values=cache).loss
    with pytest.raises(UserError, match="has no gradients; read the whole text in one call with `use_cache=False`"):
        loss.backward()


def test_a_calibration_in_memory_is_compressed_by_as_its_directory_is(bases):
    models = [tiny_model(), tiny_model()]
    for model, source in zip(models, (bases, Calibration.load(bases)), strict=True):
        lowrank_kv.compress(model, source, rate=RATE)
    first, second = (generate(model) for model in models)
    assert torch.equal(torch.stack(first.logits), torch.stack(second.logits))
    with pytest.raises(UserError, match=r"compress\(model, 'joint-mixed', bases='.*bases'\)"):
        lowrank_kv.compress(models[0], bases, preset="joint-mixed")
    with pytest.raises(UserError, match="`source` must be a preset's name, a directory, or a calibration; got None"):
        lowrank_kv.compress(models[0], None)


def test_every_mistake_names_its_remedy(bases, tmp_path):
    model, trained = tiny_model(), tiny_model()
    next(method for method in METHODS if method.name == "dynakv").build(trained, RATE)
    dynakv.save_compressor(trained, tmp_path / "run/checkpoint")
    dynakv.save_full(trained, tmp_path / "full")
    checkpoint, full = tmp_path / "run/checkpoint", tmp_path / "full"
    (tmp_path / "other").mkdir()
    for arguments, settings, message in [
        (["tokenwise"], {}, "did you mean `tokenwise-mixed`"),
        (["tokenwise"], {"bases": bases}, "unknown preset `tokenwise`; did you mean `tokenwise-mixed`"),
        (["ojakv-joint"], {}, "lowrank-kv calibrate"),
        (["ojakv-joint"], {"bases": "nowhere"}, "make one with `lowrank-kv calibrate`"),
        (["ojakv-joint"], {"bases": bases, "rate": 3}, "`rate` must be in .*; 0.1 keeps a tenth; got 3"),
        (["ojakv-joint"], {"bases": bases, "ratio": 3}, "did you mean `rate`"),
        ([bases], {"bases": bases}, "give a preset's name"),
        ([checkpoint], {"rate": 0.1}, "was trained for its own"),
        ([checkpoint], {"budget": "1 KiB/token"}, "`budget` must be left out.* was trained for its own"),
        ([bases], {"budget": "a lot"}, "`budget` must be bytes of a token"),
        ([bases], {"budget": "1 KiB/token", "rate": 0.1}, "`rate` must be left out, got 0.1: `budget` says how large"),
        ([bases], {"budget": "1 B/token"}, "budget"),
        ([checkpoint], {"bases": bases}, "holds its own"),
        ([checkpoint.parent], {}, "did you mean `.*checkpoint`"),
        ([full], {}, "from_pretrained"),
        ([tmp_path / "other"], {}, "was written by"),
        (["runs/nowhere"], {}, f"there is no `{Path.cwd()}/runs/nowhere`; `lowrank-kv calibrate` and .* write"),
    ]:
        with pytest.raises(UserError, match=message):
            lowrank_kv.compress(model, *arguments, **settings)
    assert type(generate(model).past_key_values) is DynamicCache  # none of them touched the model
    other_shape = tiny_model(num_hidden_layers=2)
    with pytest.raises(UserError, match="layers"):
        lowrank_kv.compress(other_shape, "ojakv-joint", bases=Calibration.load(bases))


@pytest.mark.parametrize("source", ["tokenwise-mixed", "ojakv-joint", None], ids=str)
@torch.no_grad()
def test_a_budget_in_bytes_is_kept_in_place_of_a_rate(source, bases):
    """None stands for the directory of the calibration, whose preset is not named."""
    arguments = (bases,) if source is None else (source,)
    more = {} if source is None else {"bases": bases}
    model = lowrank_kv.compress(tiny_model(), *arguments, budget="60000 B/200 tokens", update_period=4, **more)
    ids = torch.randint(1, 97, (1, 200), generator=torch.Generator().manual_seed(6))
    cache = model(ids).past_key_values
    assert 0.9 * 60_000 < cache.nbytes <= 60_000 < cache.full_nbytes


def test_another_cache_beside_it_is_refused_with_the_way_out(bases):
    model = lowrank_kv.compress(tiny_model(), "ojakv-joint", bases=bases)
    with pytest.raises(UserError, match=r"lowrank_kv\.uncompress\(model\)"):
        generate(model, past_key_values=DynamicCache())


def test_a_mistaken_second_compress_leaves_the_first(bases, tmp_path):
    trained = tiny_model()
    next(method for method in METHODS if method.name == "dynakv").build(trained, RATE)
    dynakv.save_compressor(trained, tmp_path / "checkpoint")
    model = lowrank_kv.compress(tiny_model(), "tokenwise-mixed", rate=RATE, bases=bases)
    expected = generate(model)
    for source, settings, message in (
        (tmp_path / "checkpoint", {"threshhold": 0.2}, "unknown key `threshhold`.*; did you mean `threshold`"),
        ("tokenwise-mixd", {"bases": bases}, "unknown preset `tokenwise-mixd`; did you mean `tokenwise-mixed`"),
        (bases, {"rate": 3.0}, "`rate` must be in .*; got 3.0"),
    ):
        with pytest.raises(UserError, match=message):
            lowrank_kv.compress(model, source, **settings)
        assert torch.equal(torch.stack(generate(model).logits), torch.stack(expected.logits))


def test_a_calibration_that_lacks_what_the_best_preset_needs_is_told(tmp_path):
    calibration = calibration_of(tiny_model(), read=False)
    with pytest.warns(UserWarning, match="does not say what is read.*`ojakv-joint` is taken"):
        lowrank_kv.compress(tiny_model(), calibration)


@pytest.mark.parametrize("part", ["config", "generation_config"])
def test_a_model_that_is_set_to_fill_no_cache_is_told(part, bases):
    model = tiny_model()
    getattr(model, part).use_cache = False
    with pytest.warns(UserWarning, match=rf"`model\.{part}\.use_cache` is False.*set it to True"):
        lowrank_kv.compress(model, bases)


@torch.no_grad()
def test_scoring_texts_by_calls_that_read_nothing_compressed_is_told(bases, recwarn):
    model = lowrank_kv.compress(tiny_model(), "tokenwise-mixed", rate=RATE, bases=bases)
    for _ in range(2):  # a prompt and what follows it
        cache = model(IDS[:, :-1]).past_key_values
        model(IDS[:, -1:], past_key_values=cache)
        generate(model)
    model(IDS, labels=IDS)
    assert not [each for each in recwarn if "two calls in a row" in str(each.message)]
    with pytest.warns(UserWarning, match="two calls in a row .* are the uncompressed model's"):
        model(IDS, labels=IDS)


@torch.no_grad()
def test_each_thread_has_its_own_calls_in_a_row(bases, recwarn):
    """Threads may share a model, and one's first call does not follow another's."""
    model = lowrank_kv.compress(tiny_model(), "tokenwise-mixed", rate=RATE, bases=bases)

    def in_a_thread(*calls):
        with ThreadPoolExecutor(1) as thread:
            for call in calls:
                thread.submit(torch.no_grad()(call)).result()

    def read():
        model(IDS[:, -1:], past_key_values=cache)

    cache = model(IDS).past_key_values
    in_a_thread(lambda: model(IDS))
    in_a_thread(read)  # another thread decodes what this one has read
    model(IDS)
    assert not [each for each in recwarn if "two calls in a row" in str(each.message)]
    with pytest.warns(UserWarning, match="two calls in a row"):
        in_a_thread(lambda: model(IDS), lambda: model(IDS))
    assert pickle.loads(pickle.dumps(copy.deepcopy(model)))(IDS).past_key_values.get_seq_length() == IDS.shape[1]
