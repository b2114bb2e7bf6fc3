"""A compressor, and a calibration, need the memory of their layers: of a model that accelerate offloads they are refused by
name. A preset needs none."""

import pytest
import torch
from accelerate import cpu_offload
from methods import calibration_of, dynakv_model, planned_model, tiny_model

import dynakv
import lowrank_kv
from lowrank_kv.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("without_gradients")

OFFLOADED = (
    "of the model has no memory: its layer is offloaded to the CPU or to disk; load the model without offloading"
)
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def ids():
    return torch.randint(1, 97, (1, 24), generator=torch.Generator().manual_seed(0))


def offloaded(model):
    return cpu_offload(model, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("served_before", [False, True])
@pytest.mark.parametrize("attach", [dynakv_model, planned_model])
def test_a_compressor_that_is_offloaded_is_refused_and_can_be_taken_off(attach, served_before, ids, tmp_path):
    stock = tiny_model().generate(ids, **OPTIONS)
    model = tiny_model()
    attach(model, 0.5)
    if served_before:
        model.generate(ids, **OPTIONS)
    offloaded(model)
    uses = (
        lambda: model.generate(ids, **OPTIONS),
        lambda: model(ids),
        lambda: model(ids, use_cache=False),
        lambda: dynakv.save_compressor(model, tmp_path / "c"),
    )
    for use in uses:
        with pytest.raises(UserError, match=f"the projection U of layer 0 keys {OFFLOADED}"):
            use()
    assert not (tmp_path / "c").exists()
    lowrank_kv.uncompress(model)
    assert torch.equal(model.generate(ids, **OPTIONS), stock)


def test_an_offloaded_model_is_neither_calibrated_nor_given_a_compressor(ids, tmp_path):
    trained = tiny_model()
    dynakv_model(trained, 0.5)
    dynakv.save_compressor(trained, tmp_path / "c")
    model = offloaded(tiny_model())
    with pytest.raises(UserError, match=f"the attention of layer 0 {OFFLOADED}"):
        calibration_of(model)
    with pytest.raises(UserError, match=f"layers.0.key.* {OFFLOADED}"):
        lowrank_kv.compress(model, tmp_path / "c")
    assert torch.equal(model.generate(ids, **OPTIONS), tiny_model().generate(ids, **OPTIONS))


def test_a_preset_serves_a_model_that_is_offloaded_and_saves_no_cache_of_it(ids, tmp_path):
    model = tiny_model()
    lowrank_kv.compress(model, "ojakv-joint", bases=calibration_of(model), rate=0.5)
    expected = model.generate(ids, **OPTIONS)
    model = offloaded(model)
    found = model.generate(ids, **OPTIONS, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    with pytest.raises(UserError, match=f"`model.embed_tokens.weight` {OFFLOADED}"):
        lowrank_kv.save_cache(model, found.past_key_values, tmp_path / "cache")
