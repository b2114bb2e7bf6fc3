"""What users call, given something else: each argument is named in a `UserError`; a leading `~` is known in every path."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from methods import METHODS, calibration_of, tiny_model

import dynakv
import lowrank_kv
import ojakv
from lowrank_kv.stores.shared_page_pool import SharedPagePool
from lowrank_kv.utils.budget import Budget, parse_size
from lowrank_kv.utils.errors import UserError
from ojakv import Calibration, OjaKVCache, OjaKVConfig, make_plan, plan_for_budget, plan_for_bytes

CONFIG = OjaKVConfig.preset("static-pca-joint", rate=0.5)
BYTES = {"share": 0.9, "prompt": 10, "tokens": 100, "itemsize": 4}
PAGES = {"max_length": 64, "rate": 0.5, "stores": 6, "granularity": 16, "width": 32, "quantization": None}


@pytest.fixture(scope="module")
def stock():
    return tiny_model()


@pytest.fixture(scope="module")
def trained():
    model = tiny_model()
    next(method for method in METHODS if method.name == "dynakv").build(model, 0.5)
    return model


@pytest.fixture(scope="module")
def calibration(stock):
    return calibration_of(stock)


@pytest.fixture(scope="module")
def compressed(calibration):
    """A model, and a cache that it filled."""
    model = lowrank_kv.compress(tiny_model(), "static-pca-joint", rate=0.5, bases=calibration, self_check=False)
    with torch.no_grad():
        return model, model(torch.arange(1, 60)[None]).past_key_values


NO_MODEL = [
    lambda given: lowrank_kv.compress(given, "ojakv-joint"),
    lambda given: lowrank_kv.uncompress(given),
    lambda given: dynakv.configure(given, cache_dtype="int8"),
    lambda given: dynakv.detach(given),
    lambda given: dynakv.save_compressor(given, "DIR"),
    lambda given: dynakv.save_full(given, "DIR"),
    lambda given: dynakv.is_attached(given),
    lambda given: dynakv.settings_of(given),
    lambda given: dynakv.open_gates(given),
    lambda given: dynakv.use_dynakv_cache(given),
    lambda given: dynakv.add_compressors(given, dynakv.DynaKVConfig()),
    lambda given: dynakv.DynaKVCache.from_model(given),
    lambda given: dynakv.compile_decoding(given),
    lambda given: ojakv.detach(given),
    lambda given: Calibration.from_text(given, torch.ones(1, 8, dtype=torch.int64)),
]


@pytest.mark.parametrize("call", NO_MODEL, ids=range(len(NO_MODEL)))
@pytest.mark.parametrize("given", [None, "MODEL"])
def test_what_is_no_model_is_named(call, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"`model` must be a transformers model, got a {type(given).__name__}"):
        call(given)
    assert not list(tmp_path.iterdir())


OTHERS = {
    "source": lambda given, on: lowrank_kv.compress(on["stock"], given),
    "bases": lambda given, on: lowrank_kv.compress(on["stock"], "ojakv-joint", bases=given),
    "cache": lambda given, on: lowrank_kv.save_cache(on["compressed"][0], given, "FILE"),
    "path": lambda given, on: lowrank_kv.save_cache(*on["compressed"], given),
    "path of load_cache": lambda given, on: lowrank_kv.load_cache(on["compressed"][0], given),
    "directory": lambda given, on: dynakv.attach(on["stock"], given),
    "directory of save_compressor": lambda given, on: dynakv.save_compressor(on["trained"], given),
    "directory of save_full": lambda given, on: dynakv.save_full(on["trained"], given),
    "directory of export_compressor": lambda given, on: dynakv.export_compressor(given, "DIR"),
    "directory of initialize": lambda given, on: dynakv.initialize_from_checkpoint(on["trained"], given),
    "directory of load": lambda given, on: Calibration.load(given),
    "directory of save": lambda given, on: on["calibration"].save(given, model="tiny", text=["a"]),
    "output": lambda given, on: dynakv.export_compressor("DIR", given),
    "base_model": lambda given, on: dynakv.export_compressor("DIR", "OTHER", base_model=given),
    "summary": lambda given, on: dynakv.save_compressor(on["trained"], "DIR", summary=given),
    "exact_tokens": lambda given, on: dynakv.set_exact_tokens(on["trained"], given),
    "config of add_compressors": lambda given, on: dynakv.add_compressors(on["stock"], given),
    "plan": lambda given, on: OjaKVCache(on["stock"], given),
    "plan of break_even_tokens": lambda given, on: ojakv.break_even_tokens(given, 4),
    "config": lambda given, on: OjaKVCache.from_model(on["stock"], given, bases=on["calibration"]),
    "calibration": lambda given, on: make_plan(given, CONFIG),
    "config of make_plan": lambda given, on: make_plan(on["calibration"], given),
    "calibration of plan_for_bytes": lambda given, on: plan_for_bytes(given, CONFIG, **BYTES),
    "config of plan_for_bytes": lambda given, on: plan_for_bytes(on["calibration"], given, **BYTES),
    "budget": lambda given, on: plan_for_budget(on["calibration"], CONFIG, given, itemsize=4),
    "nbytes": lambda given, on: Budget(nbytes=given),
    "tokens": lambda given, on: Budget(nbytes=1, tokens=given),
    "size": lambda given, on: parse_size(given, "size"),
    "share": lambda given, on: plan_for_bytes(on["calibration"], CONFIG, **{**BYTES, "share": given}),
    "tokens of plan_for_bytes": lambda given, on: plan_for_bytes(
        on["calibration"], CONFIG, **{**BYTES, "tokens": given}
    ),
    "itemsize": lambda given, on: plan_for_bytes(on["calibration"], CONFIG, **{**BYTES, "itemsize": given}),
    "expected_tokens": lambda given, on: OjaKVCache.from_model(on["stock"], CONFIG, bases="DIR", expected_tokens=given),
    "joint_layers": lambda given, on: Calibration.from_text(
        on["stock"], torch.ones(1, 8, dtype=torch.int64), joint_layers=given
    ),
    "max_length": lambda given, on: SharedPagePool(**{**PAGES, "max_length": given}),
    "rate": lambda given, on: SharedPagePool(**{**PAGES, "rate": given}),
    "rate of preset": lambda given, on: OjaKVConfig.preset("ojakv", rate=given),
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_argument_of_another_type_is_named(name, stock, trained, calibration, compressed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on = {"stock": stock, "trained": trained, "calibration": calibration, "compressed": compressed}
    with pytest.raises(UserError, match=rf"^`{name.split()[0]}` must be .*got ('list'|\[3\])"):
        OTHERS[name]([3], on)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [None, 3, [0.5]])
def test_what_is_no_name_of_a_preset_is_named(name):
    with pytest.raises(UserError, match="unknown preset `.*`; valid presets: "):
        OjaKVConfig.preset(name)


def test_a_summary_that_json_cannot_hold_leaves_no_checkpoint(trained, tmp_path):
    with pytest.raises(UserError, match="`summary` must hold what JSON can"):
        dynakv.save_compressor(trained, tmp_path / "checkpoint", summary={"model": trained})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rate", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5)], ids=repr)
def test_numbers_of_numpy_and_torch_serve_and_are_written_as_json(rate, stock, calibration, tmp_path):
    model = tiny_model()
    lowrank_kv.compress(model, "static-pca-joint", rate=rate, bases=calibration, self_check=False)
    plans = [plan_for_bytes(calibration, CONFIG, **{**BYTES, "share": share}) for share in (rate, 0.5)]
    assert plans[0].config == plans[1].config
    tokens = np.int64(3)
    assert Budget(nbytes=rate, tokens=tokens) == Budget(nbytes=0.5, tokens=3)
    assert SharedPagePool(**{**PAGES, "rate": rate, "max_length": np.int64(64)}).rate == 0.5
    calibration.save(tmp_path / "bases", model="tiny", text=["a"], heldout_share=rate, length=tokens)
    written = json.loads((tmp_path / "bases/config.json").read_text())
    assert (written["heldout_share"], written["length"]) == (0.5, 3)

    trained = dynakv.add_compressors(tiny_model(), dynakv.DynaKVConfig(rank_policy="gate", threshold=rate))
    dynakv.configure(trained, eviction={"keep_ratio": rate})
    dynakv.save_compressor(trained, tmp_path / "checkpoint", summary={"rate": rate, "steps": [tokens]})
    written = json.loads((tmp_path / "checkpoint/config.json").read_text())
    assert written["summary"] == {"rate": 0.5, "steps": [3]}
    assert written["compressor"]["threshold"] == written["compressor"]["eviction"]["keep_ratio"] == 0.5


def test_layers_that_numpy_counts_are_written_as_json(stock, tmp_path):
    ids = torch.randint(1, 97, (1, 160), generator=torch.Generator().manual_seed(1))
    options = {"read_gradients": True, "progress": False, "self_check": False}
    Calibration.from_text(stock, ids, joint_layers=np.int64(3), **options).save(tmp_path, model="tiny", text=["a"])
    assert json.loads((tmp_path / "config.json").read_text())["joint_layers"] == 3


@pytest.mark.parametrize("of", [str, Path])
def test_a_leading_tilde_is_the_users_directory_in_every_path(
    of, trained, calibration, compressed, tmp_path, monkeypatch
):
    home, here = tmp_path / "home", tmp_path / "here"
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    calibration.save(of("~/bases"), model="tiny", text=["a"])
    dynakv.save_compressor(trained, of("~/checkpoint"))
    dynakv.export_compressor(of("~/checkpoint"), of("~/exported"))
    dynakv.save_full(trained, of("~/full"))
    lowrank_kv.save_cache(*compressed, of("~/cache.safetensors"))
    assert sorted(path.name for path in home.iterdir()) == [
        "bases",
        "cache.safetensors",
        "checkpoint",
        "exported",
        "full",
    ]
    assert not list(here.iterdir())

    model = tiny_model()
    assert Calibration.is_in(of("~/bases"))
    Calibration.load(of("~/bases"))
    OjaKVCache.from_model(model, CONFIG, bases=of("~/bases"), self_check=False)
    lowrank_kv.compress(model, "static-pca-joint", bases=of("~/bases"), self_check=False)
    lowrank_kv.compress(model, of("~/checkpoint"), self_check=False)
    lowrank_kv.uncompress(model)
    dynakv.attach(model, of("~/exported"), self_check=False)
    dynakv.initialize_from_checkpoint(model, of("~/checkpoint"))
    lowrank_kv.load_cache(compressed[0], of("~/cache.safetensors"))
