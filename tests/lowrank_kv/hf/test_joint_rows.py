"""A token's key and value as one row of coefficients."""

import copy
import dataclasses
import hashlib
import json

import pytest
import torch
from methods import calibration_of, tiny_model
from safetensors.torch import load_file, save_file
from tensors_held import found_tensors

from lowrank_kv.calibration.activation_moments import KEY, KEY_VALUE, VALUE, observe
from lowrank_kv.calibration.bit_plans import coded_bases, coded_model
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.utils.errors import UserError
from ojakv import OjaKVCache, OjaKVConfig, make_plan

SHORT = {"update_period": 4, "recent_window": 3, "num_sink_tokens": 2}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def calibration(model):
    return calibration_of(model, read=True)


def cache_of(model, calibration, name="joint-mixed", **overrides) -> OjaKVCache:
    own = {"own_directions_from": 8} if name == "joint-mixed" else {}
    config = OjaKVConfig.preset(name, rate=0.25, **SHORT, **own, **overrides)
    return OjaKVCache(model, make_plan(calibration, config))


def read(model, cache, count=48, batch=1, seed=5):
    ids = torch.randint(1, 97, (batch, count), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        model(input_ids=ids[:, : count - 8], past_key_values=cache)
        return torch.cat([model(input_ids=part, past_key_values=cache).logits for part in ids[:, -8:].split(1, 1)], 1)


def pairs_of(cache):
    return [(each.key, each.value) for layer in cache.compressed_layers() for each in layer.sequences]


def test_moments_of_both_are_those_of_their_rows(model):
    """A tile of the moment that a calibration takes of rows [key, value] is what a plain product of these rows gives."""
    blocks = torch.randint(1, 97, (2, 160), generator=torch.Generator().manual_seed(3))
    found = Calibration.from_text(model, blocks, read=True, progress=False, self_check=False).joint_read_states()
    part = ExactTokens().read_by_some(160)
    rows: dict[int, dict[str, list[torch.Tensor]]] = {index: {KEY: [], VALUE: []} for index in found}
    for block in blocks:
        observe(
            model, block[None], lambda i, side, x: rows[i][side].append(x[part]), sides=(KEY, VALUE), progress=False
        )
    for index, states in found.items():
        both = torch.cat([torch.cat(rows[index][side]) for side in (KEY, VALUE)], dim=1).double()
        torch.testing.assert_close(states.state_CC.double(), both.mT @ both / len(both), rtol=1e-4, atol=1e-6)
        width = len(states.gradient_CC) // 2
        assert float(states.gradient_CC[:width, width:].abs().max()) > 0


def test_a_calibration_says_it_again_from_a_disk(tmp_path, calibration):
    calibration.save(tmp_path / "bases", model="tiny", text=["made up"])
    found = Calibration.load(tmp_path / "bases").joint_read_states()
    for index, states in calibration.joint_read_states().items():
        torch.testing.assert_close(found[index].state_CC, states.state_CC, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found[index].gradient_CC, states.gradient_CC, rtol=1e-6, atol=1e-9)
        assert torch.equal(found[index].sample_NC, states.sample_NC)
        assert torch.equal(found[index].fit.gate.linear_C, states.fit.gate.linear_C)


def test_an_older_calibration_serves_other_presets_and_is_refused_for_this_one(model, calibration):
    older = dataclasses.replace(
        calibration,
        read={i: {side: sides[side] for side in (KEY, VALUE)} for i, sides in calibration.read.items()},
    )
    read(model, cache_of(model, older, "tokenwise-mixed"))
    with pytest.raises(UserError, match=r"does not say what keys and values have in common.* make it anew"):
        cache_of(model, older)


def test_a_file_of_which_a_part_is_missing_is_refused(tmp_path, calibration):
    directory = tmp_path / "bases"
    calibration.save(directory, model="tiny", text=["made up"])
    flat = load_file(directory / "moments.safetensors")
    del flat["layers.1.key_value_read_gate"]
    save_file(flat, directory / "moments.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["sha256"] = hashlib.sha256((directory / "moments.safetensors").read_bytes()).hexdigest()
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"it has no layers\.1\.key_value_read_gate; calibrate again"):
        Calibration.load(directory)


def test_what_both_have_in_common_is_coded_once():
    """Where values are a rotation of keys, rows of both need about half of the bits for the same loss."""
    model = tiny_model()
    width = model.model.layers[0].self_attn.k_proj.weight.shape[0]
    turn = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(8))).Q
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data.copy_(turn @ layer.self_attn.k_proj.weight.data)
    calibration = calibration_of(model, blocks=16, read=True)
    apart, together = (coded_model(calibration, 0.2, joint_kv=joint).loss_per_rate for joint in (False, True))
    assert together < 0.5 * apart, (together, apart)
    kinds = coded_bases(calibration, 0.2, joint_kv=True)
    assert {tuple(sides) for sides in kinds.values()} == {(KEY_VALUE,)}


@pytest.mark.parametrize("name", ["joint-mixed", "static-mixed"])
def test_keys_and_values_are_one_row_through_every_change(model, calibration, name):
    cache = cache_of(model, calibration, name, joint_kv=True)
    read(model, cache, batch=2)
    twin = copy.deepcopy(cache)

    def check(each: OjaKVCache, count: int) -> None:
        for key, value in pairs_of(each):
            assert value.coef is key.coef
            assert key.coef.length > 0
            assert getattr(value, "own", None) is getattr(key, "own", None)
        assert each.get_seq_length() == count

    check(cache, 48)
    cache.crop(30)
    check(cache, 30)
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    check(cache, 30)
    check(twin, 48)
    for (key, _), (other, _) in zip(pairs_of(cache), pairs_of(twin), strict=False):
        assert key.coef is not other.coef


def test_each_byte_is_counted_once(model, calibration):
    cache = cache_of(model, calibration)
    read(model, cache)
    held = sum(tensor.untyped_storage().nbytes() for tensor in found_tensors(cache))
    assert cache.nbytes == sum(tensor.nbytes for _, tensor in cache.tensors_by_kind())
    assert cache.nbytes <= held
    rows = [key.coef for key, _ in pairs_of(cache)]
    packed = sum(tensor.nbytes for each in rows for _, tensor in each.tensors_by_kind())
    apart = cache_of(model, calibration, "adaptive-mixed", own_directions_from=8)
    read(model, apart)
    of_both = [store.coef for pair in pairs_of(apart) for store in pair]
    assert packed <= 1.05 * sum(tensor.nbytes for each in of_both for _, tensor in each.tensors_by_kind())


@pytest.mark.parametrize("attention", ["low_rank", "reconstructed"])
def test_attention_over_rows_of_both_is_attention_over_what_they_rebuild(model, calibration, attention):
    """Both ways to attend read the same rows: their logits differ by rounding alone."""
    found = read(model, cache_of(model, calibration, attention=attention), batch=2)
    other = read(model, cache_of(model, calibration, attention="reconstructed", prefill="exact"), batch=2)
    torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-4)


def test_evicted_tokens_are_gone_from_keys_and_values(model, calibration):
    cache = cache_of(model, calibration, eviction={"keep_ratio": 0.5})
    read(model, cache)
    for key, value in pairs_of(cache):
        assert value.coef is key.coef
        assert 0 < key.coef.length < 40 - 5


def test_it_needs_a_plan_of_bits():
    with pytest.raises(UserError, match=r"`joint_kv` must be false with `cache_dtype: model`"):
        OjaKVConfig.preset("static-joint-pf", joint_kv=True)
