"""Checkpoints: what is written is what is loaded, and nothing damaged is loaded or half-written."""

import json
import os
import sys
import warnings

import pytest
import torch
from methods import dynakv_model, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import dynakv
from dynakv.checkpoint import write_compressor
from dynakv.checkpoint_files import CONFIG, WEIGHTS
from lowrank_kv.utils import atomic_write
from lowrank_kv.utils.errors import UserError


@pytest.fixture
def trained():
    model = tiny_model()
    dynakv_model(model, 0.4, granularity=4)
    return model


@pytest.fixture
def ids():
    return torch.randint(1, 97, (2, 24), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_compressor_round_trip(trained, ids, tmp_path):
    dynakv.save_compressor(trained, tmp_path / "c", summary={"steps": 3})
    loaded = dynakv.attach(tiny_model(), tmp_path / "c")
    assert torch.equal(loaded(ids).logits, trained(ids).logits)
    assert json.loads((tmp_path / "c" / CONFIG).read_text())["summary"] == {"steps": 3}
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [WEIGHTS, CONFIG]


@pytest.mark.parametrize("summary", [[1], "better", 0.5])
def test_a_summary_that_could_not_be_loaded_is_not_saved(tmp_path, summary):
    model = tiny_model()
    dynakv_model(model, 0.4)
    with pytest.raises(UserError, match="`summary` must be a dictionary, or left out; got "):
        dynakv.save_compressor(model, tmp_path / "c", summary=summary)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("settings", [{}, {"decoder": "decoupled"}], ids=str)
def test_what_is_attached_in_inference_mode_serves_and_trains(settings, ids, tmp_path):
    trained = tiny_model()
    dynakv_model(trained, 0.4, **settings)
    dynakv.save_compressor(trained, tmp_path / "c")
    model, options = tiny_model(), {"max_new_tokens": 4, "do_sample": False}
    expected = trained.generate(ids, **options)
    with torch.inference_mode():
        dynakv.attach(model, tmp_path / "c")
        layers = dynakv.checkpoint.load_compressors(tmp_path / "c")
        assert torch.equal(model.generate(ids, **options), expected)
        layers[0].key.encode(torch.randn(1, 3, layers[0].key.width))
    assert torch.equal(model.generate(ids, **options), expected)
    model.train()(ids).logits.sum().backward()
    gradients = [each.grad for layer in dynakv.compressors(model).values() for each in layer.parameters()]
    assert all(each is not None for each in gradients)


@torch.no_grad()
@pytest.mark.parametrize("decoder", ["exact", "orthogonal"])
def test_full_checkpoint_loads_with_stock_from_pretrained(ids, tmp_path, decoder):
    trained = tiny_model()
    dynakv_model(trained, 0.4, decoder=decoder)
    dynakv.save_full(trained, tmp_path / "full")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "full").eval()
    assert type(loaded) is type(trained)
    assert torch.equal(loaded(ids).logits, trained(ids).logits)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    output = loaded.generate(ids, return_dict_in_generate=True, **options)
    assert isinstance(output.past_key_values, dynakv.DynaKVCache)
    assert torch.equal(output.sequences, trained.generate(ids, **options))
    # A loaded model saves itself again as a full checkpoint.
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(again(ids).logits, trained(ids).logits)


@torch.no_grad()
def test_full_checkpoint_loads_in_bfloat16(trained, ids, tmp_path):
    dynakv.save_full(trained, tmp_path / "full")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.bfloat16).eval()
    dynakv.save_compressor(trained, tmp_path / "c")
    tiny_model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).eval()
    attached = dynakv.attach(base, tmp_path / "c")
    assert torch.equal(loaded(ids).logits, attached(ids).logits), "U, W and b keep their precision"
    output = loaded.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, return_dict_in_generate=True
    )
    assert output.past_key_values.layers[0].sequences[0].key.dtype == torch.bfloat16


def test_saving_leaves_the_model_s_config_as_it_was(trained, tmp_path):
    dynakv.save_full(trained, tmp_path / "full")
    assert getattr(trained.config, "quantization_config", None) is None


def test_a_checkpoint_for_another_shape_is_refused(trained, tmp_path):
    dynakv.save_compressor(trained, tmp_path / "c")
    other = tiny_model(num_hidden_layers=2)
    with pytest.raises(UserError, match="3 compressed layers.*this model has 2 compressed layers"):
        dynakv.attach(other, tmp_path / "c")
    with pytest.raises(UserError, match="no DynaKV compressor"):
        dynakv.compressors(other)


@pytest.mark.parametrize("keep", [0, 100, -40])
def test_a_truncated_file_is_refused(trained, tmp_path, keep):
    dynakv.save_compressor(trained, tmp_path / "c")
    weights = tmp_path / "c" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:keep])
    model = tiny_model()
    with pytest.raises(UserError, match="truncated"):
        dynakv.attach(model, tmp_path / "c")
    with pytest.raises(UserError, match="no DynaKV compressor"):
        dynakv.compressors(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged"),
        ("{}", "no DynaKV compressor checkpoint"),
        (b"\xff\xfe", "damaged"),
        ('{"method": "dynakv"}', "config.json is damaged: it has no `base_model`"),
        ({"summary": []}, r"config.json is damaged: its `summary` is \[\]"),
        (
            {"geometry": {"layers": [0, 1, 2], "num_kv_heads": 2}},
            "`geometry` in .*config.json is damaged: .* no `head_dim`",
        ),
    ],
)
def test_a_damaged_config_is_refused(trained, tmp_path, text, message):
    dynakv.save_compressor(trained, tmp_path / "c")
    path = tmp_path / "c" / CONFIG
    if isinstance(text, dict):
        text = json.dumps(json.loads(path.read_text()) | text)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        dynakv.attach(tiny_model(), tmp_path / "c")


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(UserError, match="no DynaKV checkpoint"):
        dynakv.attach(tiny_model(), tmp_path / "nowhere")


def test_a_failed_save_leaves_the_old_checkpoint(trained, tmp_path):
    dynakv.save_compressor(trained, tmp_path / "c")
    before = (tmp_path / "c" / WEIGHTS).read_bytes()
    dynakv.compressors(trained)[1].value.projection.weight.data.zero_()
    with pytest.raises(UserError, match="layer 1 values"):
        dynakv.save_compressor(trained, tmp_path / "c")
    assert (tmp_path / "c" / WEIGHTS).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_what_is_no_checkpoint_is_not_replaced(trained, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to(tmp_path / "notes")
    for save in (dynakv.save_compressor, dynakv.save_full):
        with pytest.raises(
            UserError, match="notes` holds other things and no `.*`, so that replacing it would lose them"
        ):
            save(trained, tmp_path / "notes")
        for name in ("file", "link"):
            with pytest.raises(UserError, match=f"{name}` is a file or a link"):
                save(trained, tmp_path / name)
    assert (tmp_path / "notes/thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "notes"]
    (tmp_path / "empty").mkdir()
    dynakv.save_compressor(trained, tmp_path / "empty")


def test_a_compressor_of_another_model_is_told(trained, tmp_path):
    trained.config._name_or_path = "somebody/one"
    dynakv.save_compressor(trained, tmp_path / "checkpoint")
    for name, warns in (("elsewhere/one", False), ("somebody/two", True)):
        model = tiny_model()
        model.config._name_or_path = name
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dynakv.attach(model, tmp_path / "checkpoint")
        found = [str(warning.message) for warning in caught if "was made on `one`" in str(warning.message)]
        assert bool(found) == warns


def test_an_interrupted_replacement_brings_the_old_checkpoint_back(trained, tmp_path, monkeypatch):
    dynakv.save_compressor(trained, tmp_path / "c")
    before = (tmp_path / "c" / WEIGHTS).read_bytes()
    replace = os.replace

    def fail_on_the_new_one(source, target):
        if "-partial-" in str(source):
            raise OSError("disk full")
        replace(source, target)

    monkeypatch.setattr(atomic_write, "_exchange", lambda *_: False)  # as on a file system that cannot
    monkeypatch.setattr(os, "replace", fail_on_the_new_one)
    with pytest.raises(OSError, match="disk full"):
        dynakv.save_compressor(trained, tmp_path / "c")
    assert (tmp_path / "c" / WEIGHTS).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@torch.no_grad()
def test_detaching_a_full_checkpoint_leaves_a_stock_model(trained, ids, tmp_path):
    dynakv.save_full(trained, tmp_path / "full")
    loaded = dynakv.detach(AutoModelForCausalLM.from_pretrained(tmp_path / "full").eval())
    assert loaded.config._attn_implementation == "sdpa"
    loaded.save_pretrained(tmp_path / "stock")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()
    assert torch.equal(stock(ids).logits, tiny_model()(ids).logits)


def test_attaching_twice_is_refused(trained, tmp_path):
    dynakv.save_compressor(trained, tmp_path / "c")
    with pytest.raises(UserError, match="already has a compressor"):
        dynakv.attach(trained, tmp_path / "c")


def test_settings_of_serving_may_differ_from_training(tmp_path):
    model = tiny_model()
    dynakv_model(model, 0.4)
    dynakv.save_compressor(model, tmp_path / "checkpoint")
    ids = torch.randint(1, 97, (1, 40), generator=torch.Generator().manual_seed(5))
    rates = {}
    for cache_dtype in ("model", "int8"):
        served = dynakv.attach(tiny_model(), tmp_path / "checkpoint", cache_dtype=cache_dtype)
        with torch.no_grad():
            rates[cache_dtype] = served(ids, use_cache=True).past_key_values.rate
    assert rates["int8"] < 0.6 * rates["model"]
    dynakv.configure(served, cache_dtype="model")
    with torch.no_grad():
        assert served(ids, use_cache=True).past_key_values.rate == rates["model"]
    for overrides, message in (
        ({"decoder": "orthogonal"}, "decoder"),
        ({"cache_dtyp": "int8"}, "did you mean `cache_dtype`"),
    ):
        fresh = tiny_model()
        with pytest.raises(UserError, match=message):
            dynakv.attach(fresh, tmp_path / "checkpoint", **overrides)
        with pytest.raises(UserError, match="no DynaKV compressor"):
            dynakv.compressors(fresh)


@torch.no_grad()
def test_caches_keep_to_the_settings_they_were_made_with(ids):
    model, twin = tiny_model(), tiny_model()
    for each in (model, twin):
        dynakv_model(each, 0.4)
    caches = [dynakv.DynaKVCache.from_model(each) for each in (model, twin)]
    dynakv.configure(model, threshold=0.6, granularity=16)
    for part in ids.split([20, ids.shape[1] - 22, 1, 1], dim=1):
        for each, cache in zip((model, twin), caches, strict=True):
            each(part, past_key_values=cache)
    assert caches[0].nbytes == caches[1].nbytes
    cache = dynakv.DynaKVCache.from_model(model)
    model(ids, past_key_values=cache)
    assert cache.nbytes < caches[1].nbytes


def test_a_checkpoint_that_does_not_fit_leaves_the_model_as_it_was(trained, ids, tmp_path):
    dynakv.save_compressor(trained, tmp_path / "c")
    (tmp_path / "damaged").mkdir()
    tensors = load_file(tmp_path / "c/compressor.safetensors")
    tensors.pop("layers.1.value.gate.bias")
    write_compressor(trained, tmp_path / "damaged", tensors)
    model = tiny_model()
    with pytest.raises(UserError, match="does not fit this model: missing .*layers.1.value.gate.bias.*; restore it"):
        dynakv.attach(model, tmp_path / "damaged")
    assert not dynakv.is_attached(model)
    assert model.config._attn_implementation == "sdpa"
    dynakv.attach(model, tmp_path / "c")
    unsupported = tiny_model(attn_implementation="flex_attention")
    with pytest.raises(UserError, match="attn_implementation='flex_attention'"):
        dynakv.attach(unsupported, tmp_path / "c")
    assert not dynakv.is_attached(unsupported)
    assert not hasattr(unsupported.config, "quantization_config")


@pytest.mark.parametrize(
    ("trained", "overrides", "message"),
    [
        ({}, {"gate_decay": 9.0}, "`gate_decay` cannot be overridden with 9.0: it is how the gate starts training"),
        ({}, {"mask": "straight_through"}, "`mask` cannot be overridden with 'straight_through'.* serves as 'hard'"),
        (
            {"rank_policy": "nested"},
            {"threshold": 0.9},
            "`threshold` cannot be overridden with 0.9: with `rank_policy: nested`",
        ),
        (
            {},
            {"own_directions_from": 7},
            "`own_directions_from` cannot be overridden with 7: .* any `rank_policy` but plan",
        ),
        ({"rank_policy": "nested"}, {"granularity": 16}, "`granularity` cannot be overridden with 16: with"),
        ({"rank_policy": "nested"}, {"mask": "soft_prefix"}, "`mask` cannot be overridden with 'soft_prefix': with"),
        (
            {"rank_policy": "soft_threshold"},
            {"threshold": 0.9},
            "`threshold` cannot be overridden with 0.9: with `rank_p",
        ),
    ],
)
def test_an_override_that_would_change_nothing_is_refused(tmp_path, trained, overrides, message):
    settings = dynakv.DynaKVConfig(**trained)
    with pytest.raises(UserError, match=message):
        settings.overridden(**overrides)
    model = dynakv.add_compressors(tiny_model(), settings)
    dynakv.save_compressor(model, tmp_path / "c")
    fresh = tiny_model()
    with pytest.raises(UserError, match=message):
        dynakv.attach(fresh, tmp_path / "c", **overrides)
    # What is said again is no override, so that a command may pass what it was given or else what was trained.
    [key] = overrides
    dynakv.attach(fresh, tmp_path / "c", **{key: getattr(settings, key)})
    with pytest.raises(UserError, match=message):
        dynakv.configure(fresh, **overrides)
    assert dynakv.compressors(fresh)[0].key.config == settings


STEPS = {  # of attaching: the function that fails, and how often it does not
    "making compressors": ("dynakv.attaching", "layer_compressor", 1),
    "reading weights": ("dynakv.checkpoint_files", "read_state", 0),
    "filling compressors": ("dynakv.checkpoint", "_fill", 0),
    "preparing the model": ("lowrank_kv.hf.prepare", "rotary_function", 1),
    "setting the cache": ("dynakv.attaching", "set_default_cache", 0),
    "declaring the method": ("lowrank_kv.hf.full_checkpoint", "declare", 0),
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError, UserError])
@pytest.mark.parametrize("step", STEPS)
def test_attaching_that_is_cut_short_leaves_the_stock_model(trained, ids, tmp_path, monkeypatch, step, error):
    dynakv.save_compressor(trained, tmp_path / "c")
    model, stock = tiny_model(), tiny_model()
    module, name, before = STEPS[step]
    real, calls = getattr(sys.modules[module], name), []

    def cut_short(*arguments, **keywords):
        calls.append(name)
        if len(calls) > before:
            raise error("cut short")
        return real(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[module], name, cut_short)
        with pytest.raises(error, match="cut short"):
            dynakv.attach(model, tmp_path / "c", self_check=False)
    assert not dynakv.is_attached(model)
    assert model.state_dict().keys() == stock.state_dict().keys()
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "quantization_config")
    assert not any(each._forward_pre_hooks for each in model.modules())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock(ids).logits)
        dynakv.attach(model, tmp_path / "c", self_check=False)
        assert torch.equal(model(ids).logits, trained(ids).logits)
