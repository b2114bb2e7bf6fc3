"""A saved cache goes on where it was: in another process, in another copy of the model, for every method and family."""

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from families import BY_NAME, FAMILIES, RECURRENT
from methods import METHODS, calibration_of, dynakv_model, tiny_model
from ready_python import program
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

import dynakv
import lowrank_kv
from lowrank_kv.hf.cache.saved_cache import _digest, _packed, _unpacked
from lowrank_kv.hf.cache.state_graph import StateReader, StateWriter
from lowrank_kv.hf.rotary import _of_queries_and_keys
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig, make_plan

GOES_ON = """
import sys

import torch
from methods import METHODS, tiny_model

import lowrank_kv

name, directory = sys.argv[1:]
model = tiny_model()
[make_cache] = [method.build(model, 0.4) for method in METHODS if method.name == name]
cache = lowrank_kv.load_cache(model, f"{directory}/cache.safetensors", empty=make_cache())
tokens = torch.load(f"{directory}/tokens.pt")
with torch.no_grad():
    logits = [model(step, past_key_values=cache).logits for step in tokens.split(1, dim=1)]
torch.save(torch.cat(logits, dim=1), f"{directory}/logits.pt")
"""
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


def random_ids(batch: int = 2, length: int = 40) -> torch.Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(0))


def read(model, cache, ids: torch.Tensor, count: int) -> None:
    """The last two tokens one by one, so that what compiled code keeps ready is made."""
    for part in (ids[:, : count - 2], ids[:, count - 2 : count - 1], ids[:, count - 1 : count]):
        model(part, past_key_values=cache)


def read_on(model, cache, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(step, past_key_values=cache).logits for step in ids.split(1, dim=1)], dim=1)


@pytest.mark.parametrize("name", ["dynakv", "ojakv", "adaptive-mixed", "joint-mixed"])
@pytest.mark.parametrize("compiled", ["1", "0"], ids=["", "without compiled code"])
@torch.no_grad()
def test_a_saved_cache_goes_on_in_another_process(name, compiled, tmp_path):
    model, ids = tiny_model(), random_ids()
    [make_cache] = [method.build(model, 0.4) for method in METHODS if method.name == name]
    cache = make_cache()
    read(model, cache, ids, 31)
    lowrank_kv.save_cache(model, cache, tmp_path / "cache.safetensors")
    torch.save(ids[:, 31:], tmp_path / "tokens.pt")
    expected = read_on(model, cache, ids[:, 31:])
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{GOES_ON}"
    environment = os.environ | {"LOWRANK_KV_NATIVE": compiled}
    subprocess.run([program(), "-c", code, name, str(tmp_path)], check=True, env=environment)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, atol=1e-4, rtol=0)


@every_method
@torch.no_grad()
def test_every_method_goes_on_in_another_copy_of_the_model(method, tmp_path):
    """To the bit, although the other copy has made its bases anew."""
    ids = random_ids()
    model, twin = tiny_model(), tiny_model()
    make_cache, make_twin = method.build(model, 0.4), method.build(twin, 0.4)
    cache = make_cache()
    read(model, cache, ids, 31)
    lowrank_kv.save_cache(model, cache, tmp_path / "cache")
    loaded = lowrank_kv.load_cache(twin, tmp_path / "cache", empty=make_twin())
    assert loaded.get_seq_length() == 31
    assert loaded.nbytes <= cache.nbytes
    assert torch.equal(read_on(twin, loaded, ids[:, 31:]), read_on(model, cache, ids[:, 31:]))


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT], ids=lambda family: family.name)
@torch.no_grad()
def test_every_family_goes_on(family, tmp_path):
    """Rotations, sliding windows and recurrent states, too."""
    ids = random_ids()
    model = family.model()
    lowrank_kv.compress(model, "static-pca-joint", bases=calibration_of(model), rate=0.5)
    cache = model(ids[:, :20]).past_key_values
    read(model, cache, ids[:, 20:], 11)
    lowrank_kv.save_cache(model, cache, tmp_path / "cache")
    loaded = lowrank_kv.load_cache(model, tmp_path / "cache")
    assert torch.equal(read_on(model, loaded, ids[:, 31:]), read_on(model, cache, ids[:, 31:]))


@torch.no_grad()
def test_generate_goes_on_with_a_loaded_prefix_as_with_the_cache_itself(tmp_path):
    """Drafts, beams and a second turn ask a cache for all that it can do."""
    model, ids = tiny_model(), random_ids(1)
    lowrank_kv.compress(model, "adaptive-mixed", bases=calibration_of(model, read=True), rate=0.3)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    prefix = model.generate(ids[:, :30], **options)
    lowrank_kv.save_cache(model, prefix.past_key_values, tmp_path / "cache")
    again = torch.cat([prefix.sequences, ids[:, 30:]], dim=1)
    for more in ({}, {"prompt_lookup_num_tokens": 3}):
        caches = copy.deepcopy(prefix.past_key_values), lowrank_kv.load_cache(model, tmp_path / "cache")
        texts = [model.generate(again, past_key_values=cache, **options, **more).sequences for cache in caches]
        assert torch.equal(*texts)
    loaded = lowrank_kv.load_cache(model, tmp_path / "cache")
    length = loaded.get_seq_length()
    loaded.crop(-1)
    assert loaded.get_seq_length() == length - 1
    loaded.batch_repeat_interleave(3)
    beams = model(again[:, length - 1 :].repeat(3, 1), past_key_values=loaded).logits
    single = lowrank_kv.load_cache(model, tmp_path / "cache")
    single.crop(-1)
    assert torch.equal(beams, model(again[:, length - 1 :], past_key_values=single).logits.expand_as(beams))


@pytest.mark.parametrize("name", ["dynakv", "adaptive-mixed"])
def test_a_cache_goes_on_in_another_mode_of_torch_than_it_was_read_or_loaded_in(name, tmp_path):
    model, ids = tiny_model(), random_ids()
    [make_cache] = [method.build(model, 0.4) for method in METHODS if method.name == name]
    cache = make_cache()
    with torch.inference_mode():
        read(model, cache, ids, 31)
    lowrank_kv.save_cache(model, cache, tmp_path / "cache")
    with torch.inference_mode():
        loaded = lowrank_kv.load_cache(model, tmp_path / "cache", empty=make_cache())
    with torch.no_grad():
        assert torch.equal(read_on(model, loaded, ids[:, 31:]), read_on(model, cache, ids[:, 31:]))


@torch.no_grad()
def test_a_file_has_about_the_bytes_of_the_cache_and_no_bases(tmp_path):
    model = tiny_model(max_position_embeddings=4096)
    lowrank_kv.compress(model, "joint-mixed", bases=calibration_of(model, read=True), rate=0.3)
    cache = model(random_ids(1, 2000)).past_key_values
    lowrank_kv.save_cache(model, cache, tmp_path / "cache")
    size = (tmp_path / "cache").stat().st_size
    held = copy.deepcopy(cache).nbytes  # a copy has no room to grow
    assert held < size < held + 32_000
    with safe_open(tmp_path / "cache", framework="pt") as file:
        header = json.loads(file.metadata()["header"])
    assert (header["tokens"], header["sequences"], header["dtype"]) == (2000, 1, "float32")
    assert set(header["versions"]) == {"lowrank-kv"}, "no layer is of transformers' own kinds"
    assert header["cache"] == "ojakv.cache.OjaKVCache"
    # The copy that pickle makes has the bases.
    assert len(pickle.dumps(cache)) > 2 * size


@torch.no_grad()
def test_bases_that_no_text_has_moved_are_not_in_a_file(tmp_path):
    model = tiny_model()
    config = OjaKVConfig.preset("ojakv-joint", rate=0.4, learning_rate=0, decode_learning_rate=0)
    plan = make_plan(calibration_of(model), config)
    cache = OjaKVCache(model, plan)
    model(random_ids(), past_key_values=cache)
    lowrank_kv.save_cache(model, cache, tmp_path / "cache")
    bases = {tuple(initial.vectors_PWR.mT.shape) for kv in plan.layers.values() for initial in kv}
    assert not bases & {tuple(tensor.shape) for tensor in load_file(tmp_path / "cache").values()}


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
    with pytest.raises(UserError, match="other bases or settings"):
        lowrank_kv.load_cache(model, path)


def test_another_calibration_is_refused(saved):
    model, path, _ = saved
    lowrank_kv.compress(model, "adaptive-mixed", bases=calibration_of(model, 3, read=True), rate=0.3)
    with pytest.raises(UserError, match="other bases or settings"):
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
    with pytest.raises(UserError, match="`empty` must be a compressed cache; got 'DynamicCache'"):
        lowrank_kv.load_cache(model, path, empty=DynamicCache())
    with pytest.raises(UserError, match="`cache` must be a compressed cache; got 'DynamicCache'"):
        lowrank_kv.save_cache(model, DynamicCache(), tmp_path / "other")
    with pytest.raises(UserError, match="`cache` must be a cache that has read some; got '0 tokens'"):
        lowrank_kv.save_cache(model, OjaKVCache(model, make_plan(calibration, OjaKVConfig())), tmp_path / "other")
    with pytest.raises(UserError, match="a cache of another model"):
        lowrank_kv.save_cache(tiny_model_prepared(calibration), cache, tmp_path / "other")
    with pytest.raises(UserError, match="`empty` must be a cache that has read nothing; got '40 tokens'"):
        lowrank_kv.load_cache(model, path, empty=cache)
    assert not (tmp_path / "other").exists()


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


def changed(path, target, *, header=lambda header: header, state=lambda state: state, signed=False):
    """The file with another header or state, and its hash where it is `signed`."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
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
    with pytest.raises(UserError, match="other bases or settings"):
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
        with pytest.raises(UserError, match="other bases or settings"):
            lowrank_kv.load_cache(gated, tmp_path / "gated")
        dynakv.configure(gated, granularity=given.granularity, threshold=given.threshold)
    lowrank_kv.load_cache(gated, tmp_path / "gated")


def test_a_loaded_cache_does_not_change_with_its_file_and_homes_are_expanded(saved, tmp_path, monkeypatch):
    model, path, _ = saved
    monkeypatch.setenv("HOME", str(tmp_path))
    lowrank_kv.save_cache(model, lowrank_kv.load_cache(model, path), "~/again")
    one, other = (lowrank_kv.load_cache(model, name) for name in (path, "~/again"))
    with open(tmp_path / "again", "r+b") as file:
        size = (tmp_path / "again").stat().st_size
        file.seek(size // 2)
        file.write(bytes(size // 2))
    with torch.no_grad():
        assert torch.equal(*(read_on(model, cache, random_ids()[:, :3]) for cache in (one, other)))


def test_a_cache_filled_under_autocast_is_loaded(tmp_path):
    model = BY_NAME["gpt2"].model()
    lowrank_kv.compress(model, "static-pca-joint", bases=calibration_of(model), rate=0.5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = model(random_ids()).past_key_values
        lowrank_kv.save_cache(model, cache, tmp_path / "cache")
        loaded = lowrank_kv.load_cache(model, tmp_path / "cache")
        assert torch.equal(*(read_on(model, each, random_ids()[:, :3]) for each in (loaded, cache)))


@pytest.mark.parametrize("name", ["os:system", "lowrank_kv.hf.cache.state_graph:sys", "builtins:eval", "torch:save"])
def test_a_file_names_no_other_classes(name):
    with pytest.raises(UserError, match="no part of a cache"):
        StateReader({}, [], torch.device("cpu")).read({"class": name, "state": [["a", 1]]})


def test_a_function_is_not_written():
    with pytest.raises(UserError, match="cannot be saved with a builtins.function"):
        StateWriter().write([read])


@torch.no_grad()
def test_a_compressed_model_can_be_saved_whole(tmp_path):
    model = tiny_model()
    ids = torch.randint(1, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    lowrank_kv.compress(model, "ojakv-joint", bases=calibration_of(model), rate=0.5)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded.generate(ids, max_new_tokens=6, do_sample=False), expected)


def test_rotations_of_every_form_go_into_saved_caches():
    from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb

    function = pickle.loads(pickle.dumps(_of_queries_and_keys(apply_rotary_pos_emb)))
    assert function == _of_queries_and_keys(apply_rotary_pos_emb)
