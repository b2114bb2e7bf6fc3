"""A saved cache goes on where it was: in another process, in another copy of the model, for every method and family."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import BY_NAME, FAMILIES, RECURRENT
from methods import METHODS, calibration_of, tiny_model
from ready_python import program
from safetensors import safe_open
from safetensors.torch import load_file
from saved_prefixes import random_ids, read, read_on

import dynakv
import lowrank_kv
from lowrank_kv.hf.rotary import _of_queries_and_keys
from ojakv import OjaKVCache, OjaKVConfig, make_plan

GOES_ON = """
import json
import sys

import torch
from methods import tiny_model
from saved_prefixes import random_ids, read_on

import lowrank_kv

torch.set_num_threads(int(sys.argv[3]))
for name, (source, settings) in json.loads(sys.argv[2]).items():
    model = lowrank_kv.compress(tiny_model(), source, **settings)
    cache = lowrank_kv.load_cache(model, f"{sys.argv[1]}/{name}.safetensors")
    with torch.no_grad():
        torch.save(read_on(model, cache, random_ids(seed=int(sys.argv[4]))[:, 31:]), f"{sys.argv[1]}/{name}.pt")
"""
# A text without a number at the border of two codes, where sums of another order would give it the other one.
CLEAR_TEXT = 6
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


@pytest.mark.parametrize("compiled", ["1", "0"], ids=["", "without compiled code"])
@torch.no_grad()
def test_a_saved_cache_goes_on_in_another_process(compiled, tmp_path):
    """Where that process compresses its model by the same files; other threads can turn vectors of joint bases."""
    ids, expected, how = random_ids(seed=CLEAR_TEXT), {}, {}
    for name in ("dynakv", "ojakv", "adaptive-mixed", "joint-mixed"):
        source, settings = how[name] = _files_of(name, tmp_path / name)
        model = lowrank_kv.compress(tiny_model(), source, **settings)
        cache = model(ids[:, :20]).past_key_values
        read(model, cache, ids[:, 20:], 11)
        lowrank_kv.save_cache(model, cache, tmp_path / f"{name}.safetensors")
        expected[name] = read_on(model, cache, ids[:, 31:])
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{GOES_ON}"
    environment = os.environ | {"LOWRANK_KV_NATIVE": compiled}
    arguments = [str(tmp_path), json.dumps(how), str(torch.get_num_threads()), str(CLEAR_TEXT)]
    subprocess.run([program(), "-c", code, *arguments], check=True, env=environment)
    for name, logits in expected.items():
        torch.testing.assert_close(torch.load(tmp_path / f"{name}.pt"), logits, atol=1e-4, rtol=0)


def _files_of(name: str, directory: Path) -> tuple[str, dict]:
    """What compresses a tiny model in every process: `compress(model, source, **settings)`."""
    [method] = [method for method in METHODS if method.name == name]
    model = tiny_model()
    if method.preset is None:
        method.build(model, 0.4)
        dynakv.save_compressor(model, directory)
        return str(directory), {}
    method.calibration(model, 0.4).save(directory, model="tiny", text=["random"])
    return method.preset, {"bases": str(directory), **method.settings(0.4)}


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
    assert set(header["versions"]) == {"lowrank-kv", "state"}, "no layer is of transformers' own kinds"
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


def test_a_loaded_cache_does_not_change_with_its_file_and_homes_are_expanded(tmp_path, monkeypatch):
    model, path = tiny_model(), tmp_path / "cache"
    lowrank_kv.compress(model, "adaptive-mixed", bases=calibration_of(model, read=True), rate=0.3)
    with torch.no_grad():
        lowrank_kv.save_cache(model, model(random_ids()).past_key_values, path)
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
