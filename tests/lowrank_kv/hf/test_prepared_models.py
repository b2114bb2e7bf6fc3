"""A prepared model is still a model: threads share it, it is copied, pickled and saved as any other."""

import contextlib
import copy
import pickle
import threading
import time

import pytest
import torch
from methods import METHODS, calibration_of, dynakv_model, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

import dynakv
import lowrank_kv
import ojakv
from dynakv.model_compressors import settings_of
from lowrank_kv.hf import prepare as prepare_module
from lowrank_kv.hf.default_cache import set_default_cache
from lowrank_kv.hf.prepare import restore
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
every_method = pytest.mark.parametrize(
    "method", [m for m in METHODS if m.name in ("dynakv", "ojakv-joint", "ojakv-pf")], ids=lambda m: m.name
)

# One method of each kind of layer, where all would take a minute.
QUICK = ("dynakv", "ojakv-joint", "adaptive-mixed", "joint-mixed")


def slow_but_for(method, names):
    return method if method.name in names else pytest.param(method, marks=pytest.mark.slow)


@pytest.fixture
def ids():
    return torch.randint(1, 97, (1, 24), generator=torch.Generator().manual_seed(0))


def written(model, ids, cache):
    return model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **OPTIONS)


@every_method
def test_threads_generate_with_one_model(method, ids):
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    texts = [ids, ids.flip(1)]
    alone = [written(model, text, make_cache()) for text in texts]
    # Every call of one thread's attention has begun, and none is over, when the other's begins.
    meet = threading.Barrier(2, timeout=60)

    def wait(*_) -> None:
        meet.wait()

    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_pre_hook(wait)
    results: dict[int, torch.Tensor] = {}

    def run(thread: int) -> None:
        results[thread] = written(model, texts[thread], make_cache())

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[thread].tolist() for thread in range(2)] == [text.tolist() for text in alone]


@pytest.mark.parametrize("method", [slow_but_for(method, QUICK) for method in METHODS], ids=lambda method: method.name)
def test_sixteen_threads_share_a_model(method):
    """Each with texts and caches of its own, and nobody waits for another."""
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    texts = torch.randint(1, 97, (16, 2, 24), generator=torch.Generator().manual_seed(7))
    alone = [written(model, text, make_cache()).tolist() for text in texts]
    begin, results = threading.Barrier(16, timeout=60), {}

    def run(thread: int) -> None:
        begin.wait()
        results[thread] = [written(model, texts[thread], make_cache()).tolist() for _ in range(3)]

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[thread] for thread in range(16)] == [[text] * 3 for text in alone]


@every_method
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_generates_compressed_and_alone(method, copied, ids):
    model = tiny_model()
    make_cache = method.build(model, 0.5)
    cache = make_cache()
    expected = written(model, ids, cache)
    twin = copied(model)
    nn.init.zeros_(model.lm_head.weight)  # the copy shares nothing with it
    twins_cache = dynakv.DynaKVCache.from_model(twin) if method.name == "dynakv" else make_cache()
    assert torch.equal(written(twin, ids, twins_cache), expected)
    assert twins_cache.nbytes == cache.nbytes
    with pytest.raises(UserError, match="cache_implementation"):
        twin.generate(ids, past_key_values=twins_cache, cache_implementation="static", **OPTIONS)


@torch.no_grad()
def test_an_attached_model_saves_itself_whole(ids, tmp_path):
    trained = tiny_model()
    dynakv_model(trained, 0.4, granularity=4)
    dynakv.save_compressor(trained, tmp_path / "c")
    attached = dynakv.attach(tiny_model(), tmp_path / "c", eviction={"keep_ratio": 0.5, "window_size": 4})
    dynakv.configure(attached, threshold=0.2)
    expected, cache = attached.generate(ids, **OPTIONS), dynakv.DynaKVCache.from_model(attached)
    attached(ids, past_key_values=cache)
    attached.save_pretrained(tmp_path / "full")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "full").eval()
    assert settings_of(loaded) == settings_of(attached)
    for model in (attached, loaded):
        assert torch.equal(pickle.loads(pickle.dumps(model)).generate(ids, **OPTIONS), expected)
    assert torch.equal(loaded.generate(ids, **OPTIONS), expected)
    again = dynakv.DynaKVCache.from_model(loaded)
    loaded(ids, past_key_values=again)
    assert again.nbytes == cache.nbytes < cache.full_nbytes
    dynakv.detach(attached).save_pretrained(tmp_path / "stock")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert not dynakv.is_attached(stock)


def test_a_model_that_shares_its_config_with_a_compressed_one_is_told_so(ids):
    one = tiny_model()
    other = type(one)(one.config)
    dynakv_model(one, 1.0)
    for use in (prepare_module.prepare, lowrank_kv.hf.self_check.check_by_itself, lambda model: model(ids)):
        with pytest.raises(UserError, match="config"):
            use(other)
    dynakv.detach(one)
    expected = other(ids).logits
    ojakv.detach(lowrank_kv.hf.prepare.prepare(other))
    assert torch.equal(other(ids).logits, expected)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
def test_wrapped_models_are_refused_by_name(tmp_path):
    trained = tiny_model()
    dynakv_model(trained, 0.4)
    dynakv.save_compressor(trained, tmp_path / "c")
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UserError, match=r"got a PeftModel; pass .*get_base_model"):
        dynakv.attach(wrapped, tmp_path / "c")
    dynakv.attach(wrapped.get_base_model(), tmp_path / "c")
    with pytest.raises(UserError, match="got a DataParallel"):
        OjaKVCache.from_model(nn.DataParallel(tiny_model()), OjaKVConfig(), bases=calibration_of(tiny_model()))


def in_lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


WRAPPERS = {
    "peft": in_lora,
    "parallel": nn.DataParallel,
    "compiled": torch.compile,
    "twice": lambda model: torch.compile(in_lora(model)),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize(
    ("source", "take_off"),
    [
        ("compressor", lowrank_kv.uncompress),
        ("preset", lowrank_kv.uncompress),
        ("compressor", dynakv.detach),
        ("preset", ojakv.detach),
    ],
    ids=["uncompress-compressor", "uncompress-preset", "dynakv.detach", "ojakv.detach"],
)
def test_a_compressed_model_is_stock_again_whatever_wraps_it(source, take_off, wrap, ids, tmp_path):
    model = tiny_model()
    expected = written(model, ids, None)
    if source == "compressor":
        trained = tiny_model()
        dynakv_model(trained, 0.4)
        dynakv.save_compressor(trained, tmp_path / "c")
        lowrank_kv.compress(model, tmp_path / "c")
    else:
        lowrank_kv.compress(model, "ojakv-joint", bases=calibration_of(model), rate=0.2)
    wrapped = wrap(model)
    assert take_off(wrapped) is wrapped
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "quantization_config")
    assert not {"init_continuous_batching", "_prepare_cache_for_generation"} & model.__dict__.keys()
    assert type(model(ids).past_key_values) is DynamicCache
    assert torch.equal(written(model, ids, None), expected)


@pytest.mark.parametrize("take_off", [lowrank_kv.uncompress, dynakv.detach, ojakv.detach, restore])
def test_what_holds_no_model_or_two_is_refused_and_left_as_it_is(take_off, ids):
    models = [tiny_model(), tiny_model()]
    for model in models:
        lowrank_kv.compress(model, "ojakv-joint", bases=calibration_of(model), rate=0.2)
    for wrong, name in ((nn.ModuleList(models), "ModuleList"), (nn.Linear(2, 2), "Linear"), (None, "NoneType")):
        with pytest.raises(UserError, match=f"`model` must be a transformers model, got a {name}"):
            take_off(wrong)
    assert all(isinstance(model(ids).past_key_values, OjaKVCache) for model in models)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
@pytest.mark.parametrize("wrap", [in_lora, nn.DataParallel], ids=["peft", "parallel"])
def test_a_wrapper_that_cannot_be_compressed_keeps_the_compression_within(wrap, ids, tmp_path):
    model = tiny_model()
    dynakv_model(model, 0.4)
    dynakv.save_compressor(model, tmp_path / "c")
    calibration = calibration_of(tiny_model())
    for source, more in ((tmp_path / "c", {}), ("ojakv-joint", {}), ("ojakv-joint", {"bases": calibration})):
        with pytest.raises(UserError, match="`model` must be a transformers model, got a .*; pass the model it wraps"):
            lowrank_kv.compress(wrap(model), source, **more)
    with pytest.raises(UserError, match="pass the model it wraps"):
        prepare_module.prepare(wrap(model))
    assert isinstance(model(ids).past_key_values, dynakv.DynaKVCache)


class Packed(nn.Module):
    """A projection that keeps its weight in buffers, eight bits a number, as quantized layers do."""

    def __init__(self, linear):
        super().__init__()
        scale_N1 = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("packed", (linear.weight.detach() / scale_N1).round().to(torch.int8))
        self.register_buffer("scale", scale_N1)

    def forward(self, states):
        return nn.functional.linear(states, self.packed * self.scale)


class Bare(nn.Module):
    """A projection with no tensor that torch knows of."""

    def __init__(self, linear):
        super().__init__()
        self.weights = [linear.weight.detach()]

    def forward(self, states):
        return nn.functional.linear(states, self.weights[0])


@pytest.mark.parametrize("projection", [Packed, Bare])
def test_attention_without_parameters_is_calibrated_and_compressed(projection, ids, tmp_path):
    model = tiny_model()
    for layer in model.model.layers:
        for name, linear in list(layer.self_attn.named_children()):
            setattr(layer.self_attn, name, projection(linear))
    expected = written(model, ids, None)
    plain = tiny_model()
    dynakv_model(plain, 1.0)
    dynakv.save_compressor(plain, tmp_path / "c")
    lowrank_kv.compress(model, tmp_path / "c")
    assert torch.equal(written(model, ids, None), expected)
    lowrank_kv.compress(model, "ojakv-joint", bases=calibration_of(lowrank_kv.uncompress(model)), rate=1.0)
    assert isinstance(model(ids).past_key_values, OjaKVCache)
    assert torch.equal(written(model, ids, None), expected)


def test_a_section_keeps_the_keys_that_are_not_given():
    model = tiny_model()
    dynakv_model(model, 0.4, eviction={"keep_ratio": 0.5, "window_size": 4, "kernel_size": 1})
    eviction = settings_of(dynakv.configure(model, eviction={"keep_ratio": 0.25})).eviction
    assert (eviction.keep_ratio, eviction.window_size, eviction.kernel_size) == (0.25, 4, 1)


def test_threads_prepare_a_model_once(monkeypatch):
    model, errors, rotary_function = tiny_model(), [], prepare_module.rotary_function

    def slowly(module):
        time.sleep(0.01)  # the other threads get as far
        return rotary_function(module)

    def run() -> None:
        try:
            prepare_module.prepare(model)
        except UserError as error:
            errors.append(error)

    monkeypatch.setattr(prepare_module, "rotary_function", slowly)
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [len(layer.self_attn._forward_pre_hooks) for layer in model.model.layers] == [1, 1, 1]


def test_threads_give_a_model_one_default_cache(monkeypatch, ids):
    """A hook that another thread's overtook would stay when the model is restored, and find nothing at every call."""
    model = prepare_module.prepare(tiny_model())
    stock, register, met = model(ids).logits, model.model.register_forward_pre_hook, threading.Barrier(2)

    def slowly(*args, **kwargs):
        with contextlib.suppress(threading.BrokenBarrierError):
            met.wait(timeout=0.5)  # the other thread gets as far, if it can
        return register(*args, **kwargs)

    monkeypatch.setattr(model.model, "register_forward_pre_hook", slowly)
    threads = [threading.Thread(target=set_default_cache, args=(model, DynamicCache, DynamicCache)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(model.model._forward_pre_hooks) == 1
    restore(model)
    torch.testing.assert_close(model(ids).logits, stock)
