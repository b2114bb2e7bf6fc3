"""What cannot be served, and what is malformed: one clear error before the engine starts."""

import pytest
from methods import calibration_of, dynakv_model, planned_model, tiny_model
from served_engines import arguments

import dynakv
from lowrank_kv.utils.errors import UserError
from lowrank_kv_vllm.plans import served_geometry
from lowrank_kv_vllm.settings import ServingConfig


def configured(files, settings, **changed):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return EngineArgs(**arguments(files, settings, **changed)).create_engine_config()


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bases": "/nowhere"}, "no calibration"),
        ({"checkpoint": "/nowhere"}, "checkpoint"),
        ({"rate": 2.0}, "rate"),
        ({"rat": 0.1}, "did you mean `rate`"),
        ({"preset": "ojakv"}, "preset"),
    ],
)
def test_malformed_settings_are_one_clear_error(files, changed, message):
    with pytest.raises(UserError, match=message):
        configured(files, {**files.settings, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"dtype": "float16"}, "float16"),
        ({"enable_lora": True}, "LoRA"),
    ],
)
def test_what_cannot_be_served_is_refused(files, changed, message):
    with pytest.raises(UserError, match=message):
        configured(files, files.settings, **changed)


def test_another_models_bases_are_refused(files, tmp_path):
    other = tiny_model(num_hidden_layers=2, head_dim=32)
    calibration_of(other, read=True).save(tmp_path / "bases", model="other", text=["random"])
    with pytest.raises(UserError, match="made for"):
        configured(files, {**files.settings, "bases": str(tmp_path / "bases")})


def test_heads_for_which_prompts_cannot_be_read_are_refused(files, tmp_path):
    other = tiny_model()
    other.save_pretrained(tmp_path / "model")
    calibration_of(other, read=True).save(tmp_path / "bases", model="other", text=["random"])
    with pytest.raises(UserError, match="16 dims"):
        configured(files, {**files.settings, "bases": str(tmp_path / "bases")}, model=str(tmp_path / "model"))


def test_a_model_with_sliding_windows_is_refused(files, tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 257, "max_position_embeddings": 256}
    other = MistralForCausalLM(MistralConfig(**shape, **heads, sliding_window=64))
    other.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="use a model without a window"):
        configured(files, files.settings, model=str(tmp_path / "model"))


def test_gates_that_nobody_measured_are_refused_and_the_remedy_is_named(files, tmp_path):
    model = tiny_model(head_dim=32, vocab_size=257)
    dynakv_model(model, 0.4)
    dynakv.save_compressor(model, tmp_path / "checkpoint")
    with pytest.raises(UserError, match="lowrank-kv measure --checkpoint"):
        configured(files, {"checkpoint": str(tmp_path / "checkpoint")})


def test_directions_of_a_sequences_own_are_refused(files, tmp_path):
    model = tiny_model(head_dim=32, vocab_size=257)
    planned_model(model, 0.3)
    dynakv.configure(model, own_directions=2)
    dynakv.save_compressor(model, tmp_path / "checkpoint")
    with pytest.raises(UserError, match="own_directions: 0"):
        served_geometry(ServingConfig(checkpoint=str(tmp_path / "checkpoint")))


def test_what_rebuilding_counts_for_is_a_calibrations_to_say(files, tmp_path):
    with pytest.raises(UserError, match="`rebuild_cost` must be left out with `checkpoint`, which says it; got 2"):
        configured(files, {"checkpoint": str(tmp_path / "checkpoint"), "rebuild_cost": 2})
    with pytest.raises(UserError, match="`rebuild_cost` must be 0 with `cache_dtype: model`"):
        configured(files, {**files.settings, "preset": "static-joint-pf", "rebuild_cost": 2})


def test_bases_that_follow_the_text_are_no_choice(files):
    with pytest.raises(UserError, match="static-joint-pf, static-mixed, tokenwise-mixed"):
        configured(files, {**files.settings, "preset": "ojakv-joint"})


def test_bases_without_what_is_read_are_refused_and_the_remedy_is_named(files, tmp_path):
    calibration_of(files.model).save(tmp_path / "bases", model="tiny", text=["random"])
    with pytest.raises(UserError, match="--read_gradients true"):
        configured(files, {**files.settings, "bases": str(tmp_path / "bases")})


def test_angles_that_depend_on_the_length_are_refused(files, tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    tiny_model(head_dim=32, vocab_size=257, rope_parameters=rope).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="`rope_type: dynamic`.*served are default, linear, llama3, yarn"):
        configured(files, files.settings, model=str(tmp_path / "model"))
