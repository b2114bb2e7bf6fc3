"""What a saved cache is not loaded into or from, and what is not saved: each with what to do."""

import dataclasses
import json

import pytest
import torch
from families import BY_NAME
from methods import METHODS, calibration_of, dynakv_model, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved_prefixes import random_ids, read, read_on
from transformers import DynamicCache

import dynakv
import lowrank_kv
from lowrank_kv.hf.cache.saved_cache import _digest, _packed, _unpacked
from lowrank_kv.hf.cache.state_graph import StateReader, StateWriter
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig, make_plan


@pytest.fixture
def saved(tmp_path):
    """A compressed model, the file of a cache that it filled, and how it was compressed."""
    model = tiny_model()
    calibration = calibration_of(model, read=True)
    lowrank_kv.compress(model, "adaptive-mixed", bases=calibration, rate=0.3)
    with torch.no_grad():
        lowrank_kv.save_cache(model, model(random_ids()).past_key_values, tmp_path / "cache")
    return model, tmp_path / "cache", calibration


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ("adaptive-mixed", {"rate": 0.4}),
        ("adaptive-mixed", {"rate": 0.3, "recent_window": 9}),
        ("tokenwise-mixed", {"rate": 0.3}),
    ],
    ids=["rate", "setting", "preset"],
)
def test_other_bases_and_settings_are_refused(saved, source, settings):
    model, path, calibration = saved
    lowrank_kv.compress(model, source, bases=calibration, **settings)
    with pytest.raises(UserError, match="^`[^`]*` is of a cache with other bases or settings"):
        lowrank_kv.load_cache(model, path)


def test_another_calibration_is_refused(saved):
    model, path, _ = saved
    lowrank_kv.compress(model, "adaptive-mixed", bases=calibration_of(model, 3, read=True), rate=0.3)
    with pytest.raises(UserError, match="^`[^`]*` is of a cache with other bases or settings"):
        lowrank_kv.load_cache(model, path)


def test_other_weights_another_dtype_and_another_method_are_refused(saved):
    model, path, calibration = saved
    other = tiny_model(seed=1)
    lowrank_kv.compress(other, "adaptive-mixed", bases=calibration_of(other, read=True), rate=0.3)
    with pytest.raises(UserError, match="other weights"):
        lowrank_kv.load_cache(other, path)
    lowrank_kv.compress(model.bfloat16(), "adaptive-mixed", bases=calibration, rate=0.3)
    with pytest.raises(UserError, match=r"another dtype \(float32, here bfloat16\)"):
        lowrank_kv.load_cache(model, path)
    gated = tiny_model()
    [dynakv_row] = [method for method in METHODS if method.name == "dynakv"]
    dynakv_row.build(gated, 0.4)
    with pytest.raises(UserError, match="another method"):
        lowrank_kv.load_cache(gated, path)


def test_another_compressor_is_refused(tmp_path):
    """Its gates alone differ, which no basis tells."""
    [row] = [method for method in METHODS if method.name == "dynakv"]
    model = tiny_model()
    cache = row.build(model, 0.4)()
    with torch.no_grad():
        model(random_ids(), past_key_values=cache)
    lowrank_kv.save_cache(model, cache, tmp_path / "cache")
    for layer in dynakv.compressors(model).values():
        layer.key.gate.bias.data += 1
    with pytest.raises(UserError, match="other weights, or with another compressor"):
        lowrank_kv.load_cache(model, tmp_path / "cache")


def test_a_stock_model_and_stock_caches_are_refused(saved, tmp_path):
    model, path, calibration = saved
    stock = tiny_model()
    with pytest.raises(UserError, match="not compressed; call lowrank_kv.compress"):
        lowrank_kv.load_cache(stock, path)
    cache = model(random_ids()).past_key_values
    with pytest.raises(UserError, match="`model` is not compressed"):
        lowrank_kv.save_cache(stock, cache, tmp_path / "other")
    with pytest.raises(UserError, match="`cache`"):
        lowrank_kv.save_cache(tiny_model(num_hidden_layers=2), cache, tmp_path / "other")
    with pytest.raises(UserError, match="`empty` must be a compressed cache, .*; got 'DynamicCache'"):
        lowrank_kv.load_cache(model, path, empty=DynamicCache())
    with pytest.raises(UserError, match="`cache` must be a compressed cache, .*; got 'DynamicCache'"):
        lowrank_kv.save_cache(model, DynamicCache(), tmp_path / "other")
    with pytest.raises(UserError, match="`cache` must be a cache that has read some; got '0 tokens'"):
        lowrank_kv.save_cache(model, OjaKVCache(model, make_plan(calibration, OjaKVConfig())), tmp_path / "other")
    with pytest.raises(UserError, match="a cache of another model"):
        lowrank_kv.save_cache(tiny_model_prepared(calibration), cache, tmp_path / "other")
    with pytest.raises(UserError, match="`empty` must be a cache that has read nothing; got '40 tokens'"):
        lowrank_kv.load_cache(model, path, empty=cache)
    assert not (tmp_path / "other").exists()
    with pytest.raises(UserError, match="is a directory; give the name of a file"):
        lowrank_kv.save_cache(model, cache, tmp_path)


def tiny_model_prepared(calibration):
    model = tiny_model()
    return lowrank_kv.compress(model, "adaptive-mixed", bases=calibration, rate=0.3)


def test_damaged_and_foreign_files_are_refused(saved, tmp_path):
    model, path, _ = saved
    for name in ("nowhere", "."):
        with pytest.raises(UserError, match="is no file"):
            lowrank_kv.load_cache(model, tmp_path / name)
    whole = path.read_bytes()
    (tmp_path / "short").write_bytes(whole[:-1])
    with pytest.raises(UserError, match="cannot be read"):
        lowrank_kv.load_cache(model, tmp_path / "short")
    (tmp_path / "flipped").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match="SHA-256"):
        lowrank_kv.load_cache(model, tmp_path / "flipped")
    save_file({"x": torch.zeros(3)}, tmp_path / "other")
    with pytest.raises(UserError, match="is no saved cache"):
        lowrank_kv.load_cache(model, tmp_path / "other")
    for header, message in (
        (lambda header: header | {"tokens": 41}, "SHA-256"),
        (lambda header: header | {"versions": {"lowrank-kv": "0.0.1"}}, "SHA-256"),
        (lambda header: header | {"sequences": "many"}, "sequences"),
        (lambda header: [], "must be a JSON object"),
    ):
        changed(path, tmp_path / "changed", header=header)
        with pytest.raises(UserError, match=message):
            lowrank_kv.load_cache(model, tmp_path / "changed")


def changed(path, target, *, header=lambda header: header, state=lambda state: state, tensors=None, signed=False):
    """The file with another header or state, or other `tensors` in place of some, and its hash where it is `signed`."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path) | (tensors or {})
    new, packed = header(json.loads(metadata["header"])), _packed(state(_unpacked(metadata["state"])))
    if signed:
        new["sha256"] = _digest(new, packed, {str(number): tensors[str(number)] for number in range(len(tensors))})
    save_file(tensors, target, metadata | {"header": json.dumps(new), "state": packed})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"header": lambda header: header | {"versions": {"lowrank-kv": "0.0.1"}}}, "other versions"),
        ({"header": lambda header: header | {"tokens": 41}}, "damaged: it holds"),
        ({"header": lambda header: header | {"sequences": 3}}, "damaged: it holds"),
        ({"state": lambda state: {"dict": state["dict"][:1]}}, "damaged"),
        ({"state": lambda state: {"same": 10**6}}, "damaged"),
        ({"state": lambda state: {"nothing": 1}}, "damaged"),
    ],
)
def test_what_a_file_says_must_fit_together(saved, tmp_path, change, message):
    """And a cache that was to be filled from it is empty still."""
    model, path, calibration = saved
    plan = make_plan(calibration, OjaKVConfig.preset("adaptive-mixed", rate=0.3))
    changed(path, tmp_path / "changed", signed=True, **change)
    empty = OjaKVCache(model, plan)
    with pytest.raises(UserError, match=message):
        lowrank_kv.load_cache(model, tmp_path / "changed", empty=empty)
    assert lowrank_kv.load_cache(model, path, empty=empty).get_seq_length() == 40


def with_state(state, kind: str, name: str, change):
    """The state with another value of an attribute, wherever an object of this class stands."""
    if isinstance(state, list):
        return [with_state(each, kind, name, change) for each in state]
    if not isinstance(state, dict):
        return state
    if state.get("class", "").endswith(f":{kind}"):
        assert name in dict(state["state"]), (kind, name)
        changed_state = [
            [n, change(v)] if n == name else [n, with_state(v, kind, name, change)] for n, v in state["state"]
        ]
        return state | {"state": changed_state}
    return {key: with_state(each, kind, name, change) for key, each in state.items()}


@pytest.mark.parametrize(
    ("method", "kind", "name", "change"),
    [
        ("adaptive-mixed", "TokenwiseCoefficients", "row_count", lambda value: {"count": 10**6}),
        ("adaptive-mixed", "TokenwiseCoefficients", "row_count", lambda value: {"count": value["count"] + 8}),
        ("adaptive-mixed", "TokenwiseCoefficients", "rank", lambda value: 4096),
        ("adaptive-mixed", "TokenPositions", "_low_rank_run", lambda value: {"slice": [10**6, 10**6 + 9, None]}),
        ("adaptive-mixed", "TokenPositions", "length", lambda value: 4),
        ("adaptive-mixed", "GrowingTensor", "row_count", lambda value: {"count": value["count"] + 1}),
        ("ojakv-joint", "Coefficients", "rank", lambda value: 4096),
        ("dynakv", "Bucket", "rank", lambda value: 4096),
        ("dynakv", "RaggedStore", "row_count", lambda value: {"count": 10**6}),
        ("dynakv", "RaggedStore", "width", lambda value: 1),
    ],
)
@torch.no_grad()
def test_a_file_whose_parts_do_not_fit_together_is_refused(tmp_path, method, kind, name, change):
    """Its hash is right, as where who wrote it was mistaken. Compiled code would read beyond its rows."""
    model = tiny_model()
    [make_cache] = [each.build(model, 0.4) for each in METHODS if each.name == method]
    cache = make_cache()
    model(random_ids(), past_key_values=cache)
    lowrank_kv.save_cache(model, cache, tmp_path / "cache")
    changed(
        tmp_path / "cache", tmp_path / "changed", signed=True, state=lambda state: with_state(state, kind, name, change)
    )
    with pytest.raises(UserError, match="do not fit together|damaged"):
        lowrank_kv.load_cache(model, tmp_path / "changed", empty=make_cache())


@torch.no_grad()
def test_tensors_that_do_not_fit_together_are_refused(tmp_path):
    model = tiny_model()
    [make_cache] = [each.build(model, 0.4) for each in METHODS if each.name == "adaptive-mixed"]
    cache = make_cache()
    model(random_ids(), past_key_values=cache)
    lowrank_kv.save_cache(model, cache, tmp_path / "cache")
    refused = 0
    for name, tensor in load_file(tmp_path / "cache").items():
        if tensor.dtype not in (torch.int32, torch.uint8) or not tensor.numel():
            continue
        other = torch.full_like(tensor, 255 if tensor.dtype == torch.uint8 else 2**30)
        changed(tmp_path / "cache", tmp_path / "changed", signed=True, tensors={name: other})
        try:
            loaded = lowrank_kv.load_cache(model, tmp_path / "changed", empty=make_cache())
        except UserError:
            refused += 1
        else:  # any number is a code of a coefficient, and a position that a token is rotated by
            assert tensor.dtype == torch.uint8 or tensor.dim() == 2
            assert model(random_ids()[:, :3], past_key_values=loaded).logits.shape[1] == 3
    assert refused >= 3 * len(model.model.layers), "classes, marks and positions of each layer"


def test_a_file_gives_no_addresses_and_replaces_no_functions(saved, tmp_path):
    """Compiled code would write where it says; a hash proves nothing of who wrote a file."""
    model, path, _ = saved

    def with_addresses(value):
        if isinstance(value, dict) and "state" in value:
            return value | {
                "state": [[n, "0x4141" if n == "native_view" else with_addresses(v)] for n, v in value["state"]]
            }
        if isinstance(value, dict):
            return {name: with_addresses(each) for name, each in value.items()}
        return [with_addresses(each) for each in value] if isinstance(value, list) else value

    changed(path, tmp_path / "changed", signed=True, state=with_addresses)
    ids, loaded = random_ids(), lowrank_kv.load_cache(model, tmp_path / "changed")
    with torch.no_grad():
        assert torch.equal(
            read_on(model, loaded, ids[:, :3]), read_on(model, lowrank_kv.load_cache(model, path), ids[:, :3])
        )
    family = BY_NAME["gemma2"]
    gemma = family.model()
    lowrank_kv.compress(gemma, "static-pca-joint", bases=calibration_of(gemma), rate=0.5)
    with torch.no_grad():
        lowrank_kv.save_cache(gemma, gemma(random_ids()).past_key_values, tmp_path / "gemma")

    def with_function(state):
        [native] = [value for name, value in state["dict"] if name == "native"]
        native["list"][0]["dict"].append(["update", 1])
        return state

    changed(tmp_path / "gemma", tmp_path / "changed", signed=True, state=with_function)
    with pytest.raises(UserError, match="damaged"):
        lowrank_kv.load_cache(gemma, tmp_path / "changed")


def test_bases_that_differ_in_their_last_digits_are_the_same_and_turned_ones_are_not(saved):
    """As they do with another number of threads. The cache of a GPU holds copies of what is one object on a CPU."""
    model, path, calibration = saved
    config = OjaKVConfig.preset("adaptive-mixed", rate=0.3)

    def plan_with(change):
        plan = make_plan(calibration, config)
        layers = {index: tuple(map(change, kv)) for index, kv in plan.layers.items()}
        return dataclasses.replace(plan, layers=layers)

    def about(initial):
        noise = 1 + 1e-6 * torch.randn(initial.vectors_PWR.shape, generator=torch.Generator().manual_seed(3))
        quantization = initial.quantization.to(torch.device("cpu"))
        return dataclasses.replace(initial, vectors_PWR=initial.vectors_PWR * noise, quantization=quantization)

    def turned(initial):
        sign_R = torch.ones(initial.vectors_PWR.shape[2])
        sign_R[2] = -1
        decoder_sign_R = sign_R[: initial.decoder_PWR.shape[2]]
        return dataclasses.replace(
            initial, vectors_PWR=initial.vectors_PWR * sign_R, decoder_PWR=initial.decoder_PWR * decoder_sign_R
        )

    lowrank_kv.load_cache(model, path, empty=OjaKVCache(model, plan_with(about)))
    with pytest.raises(UserError, match="^`[^`]*` is of a cache with other bases or settings"):
        lowrank_kv.load_cache(model, path, empty=OjaKVCache(model, plan_with(turned)))


def test_another_rotation_and_other_settings_of_a_compressor_are_refused(saved, tmp_path):
    model, path, calibration = saved
    other = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    lowrank_kv.compress(other, "adaptive-mixed", bases=calibration, rate=0.3)
    with pytest.raises(UserError, match="another configuration"):
        lowrank_kv.load_cache(other, path)
    gated = tiny_model()
    cache = dynakv_model(gated, 0.4)()
    with torch.no_grad():
        gated(random_ids(), past_key_values=cache)
    lowrank_kv.save_cache(gated, cache, tmp_path / "gated")
    given = dynakv.compressors(gated)[0].key.config
    for settings in ({"granularity": 8}, {"threshold": 0.5}):
        dynakv.configure(gated, **settings)
        with pytest.raises(UserError, match="^`[^`]*` is of a cache with other bases or settings"):
            lowrank_kv.load_cache(gated, tmp_path / "gated")
        dynakv.configure(gated, granularity=given.granularity, threshold=given.threshold)
    lowrank_kv.load_cache(gated, tmp_path / "gated")


@pytest.mark.parametrize("name", ["os:system", "lowrank_kv.hf.cache.state_graph:sys", "builtins:eval", "torch:save"])
def test_a_file_names_no_other_classes(name):
    with pytest.raises(UserError, match="no part of a cache"):
        StateReader({}, [], torch.device("cpu")).read({"class": name, "state": [["a", 1]]})


def test_a_function_is_not_written():
    with pytest.raises(UserError, match="cannot be saved with a builtins.function"):
        StateWriter().write([read])
