"""A cache that `torch.save` has written goes on where it was, in another process, too."""

import os
import pickle
import subprocess
import sys

import pytest
import torch
from methods import METHODS, calibration_of, tiny_model
from ready_python import program

import lowrank_kv
from lowrank_kv.hf.rotary import _of_queries_and_keys

GOES_ON = """
import sys

import torch
from methods import METHODS, tiny_model

name, directory = sys.argv[1:]
model = tiny_model()
[make_cache] = [method.build(model, 0.4) for method in METHODS if method.name == name]
make_cache()
cache, tokens = torch.load(f"{directory}/cache.pt", weights_only=False)
with torch.no_grad():
    logits = [model(step, past_key_values=cache).logits for step in tokens.split(1, dim=1)]
torch.save(torch.cat(logits, dim=1), f"{directory}/logits.pt")
"""


@pytest.mark.parametrize("name", ["dynakv", "ojakv", "ojakv-joint", "tokenwise-mixed", "adaptive-mixed", "joint-mixed"])
@pytest.mark.parametrize("compiled", ["1", "0"], ids=["", "without compiled code"])
@torch.no_grad()
def test_a_saved_cache_goes_on_in_another_process(name, compiled, tmp_path):
    model = tiny_model()
    [make_cache] = [method.build(model, 0.4) for method in METHODS if method.name == name]
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    cache = make_cache()
    model(ids[:, :30], past_key_values=cache)
    model(ids[:, 30:31], past_key_values=cache)  # what compiled code keeps ready is made
    torch.save((cache, ids[:, 31:]), tmp_path / "cache.pt")
    expected = torch.cat([model(step, past_key_values=cache).logits for step in ids[:, 31:].split(1, dim=1)], dim=1)
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{GOES_ON}"
    environment = os.environ | {"LOWRANK_KV_NATIVE": compiled}
    subprocess.run([program(), "-c", code, name, str(tmp_path)], check=True, env=environment)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, atol=1e-4, rtol=0)


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
