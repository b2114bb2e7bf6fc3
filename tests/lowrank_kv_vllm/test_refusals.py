"""What cannot be served, and what is malformed: one clear error before the engine starts."""

import importlib
import logging

import pytest
from methods import calibration_of, dynakv_model, planned_model, tiny_model
from served_engines import BLOCK, cohere, configured, serving, windowed, with_compressor
from transformers import FalconH1Config, JambaConfig

import dynakv
from lowrank_kv.utils.errors import UserError
from lowrank_kv_vllm.plans import origin_of
from lowrank_kv_vllm.settings import ServingConfig

pytestmark = pytest.mark.usefixtures("offline")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bases": "/nowhere"}, "no calibration"),
        ({"checkpoint": "/nowhere"}, "`checkpoint` must be given, or else `bases`, and not both"),
        ({"rate": 2.0}, "rate"),
        ({"rat": 0.1}, "did you mean `rate`"),
        ({"preset": "ojakv"}, "preset"),
    ],
)
def test_malformed_settings_are_one_clear_error(files, changed, message):
    with pytest.raises(UserError, match=message):
        configured(files, {**files.settings, **changed})


def test_a_checkpoint_that_is_not_there_is_named(files):
    with pytest.raises(UserError, match=r"/nowhere.* is no DynaKV checkpoint: cannot read"):
        configured(files, {"checkpoint": "/nowhere"})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"dtype": "float16"}, "float16"),
        ({"block_size": 30}, "`block_size` is 30, .*; set it to 128"),
        ({"enable_lora": True}, "`enable_lora` is true, .*; leave it out, or merge"),
        ({"kv_cache_dtype": "bfloat16"}, "set `kv_cache_dtype` to float32"),  # which is the model's
        ({"attention_backend": "TORCH_SDPA"}, "`attention_backend` is TORCH_SDPA, .*; leave it out"),
        ({"model_impl": "transformers"}, "`model_impl` is 'transformers', .*`--model-impl vllm`"),
    ],
)
def test_what_cannot_be_served_is_refused(files, changed, message):
    with pytest.raises(UserError, match=message):
        configured(files, files.settings, **changed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0.001}, "the rate 0.001 leaves no bit .*; give at least"),
        ({"num_sink_tokens": BLOCK}, f"`num_sink_tokens` must be below the block size, {BLOCK} tokens; got {BLOCK}"),
        ({"preset": "static-mixed"}, "`page_margin` must be left out"),
    ],
)
def test_settings_that_would_fail_in_the_worker_are_refused_before_the_model_is_loaded(files, settings, message):
    with pytest.raises(UserError, match=message):
        configured(files, {**files.settings, **settings})


def test_families_that_vllm_runs_by_the_code_of_transformers_are_refused(files, tmp_path):
    from transformers import Olmo2Config, Olmo2ForCausalLM

    shape = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes = {"num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 256, "pad_token_id": 0}
    Olmo2ForCausalLM(Olmo2Config(**shape, **sizes)).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="`model_impl` is 'auto', with which vLLM runs this olmo2 model by the code of"):
        configured(files, files.settings, model=str(tmp_path / "model"))


def test_the_plugins_own_attention_may_be_asked_for(files):
    configured(files, files.settings, attention_backend="CUSTOM")


def test_dtypes_are_those_that_the_backend_names(files, monkeypatch):
    import torch

    from lowrank_kv_vllm.backend import PagedBackend

    monkeypatch.setattr(PagedBackend, "supported_dtypes", [torch.bfloat16])
    with pytest.raises(UserError, match="`dtype` is float32; compressed pages are served in bfloat16"):
        configured(files, files.settings)


def test_another_models_bases_are_refused(files, tmp_path):
    other = tiny_model(num_hidden_layers=2, head_dim=32)
    calibration_of(other, read=True).save(tmp_path / "bases", model="other", text=["random"])
    with pytest.raises(UserError, match="made for"):
        configured(files, {**files.settings, "bases": str(tmp_path / "bases")})


@pytest.mark.parametrize("kind", ["bases", "checkpoint"])
@pytest.mark.parametrize("name", ["model", "model-Instruct"])
def test_what_was_made_on_a_model_of_another_name_is_served_with_a_warning(files, tmp_path, caplog, kind, name):
    logging.getLogger("vllm.lowrank_kv").addHandler(caplog.handler)  # vLLM's loggers end at its own
    model = tiny_model(head_dim=32, vocab_size=257)
    model.config._name_or_path = f"somebody/{name}"
    if kind == "bases":
        settings = {**files.settings, "bases": str(tmp_path / kind)}
        calibration_of(model, read=True).save(tmp_path / kind, model=f"somebody/{name}", text=["random"])
    else:
        settings = {"checkpoint": str(tmp_path / kind)}
        planned_model(model, 0.3)
        dynakv.save_compressor(model, tmp_path / kind)
    configured(files, settings)
    logging.getLogger("vllm.lowrank_kv").removeHandler(caplog.handler)
    said = [each.getMessage() for each in caplog.records if "was made on" in each.getMessage()]
    if name == "model":
        assert not said
    else:
        assert f"`{tmp_path / kind}` was made on `model-Instruct`, and this model is `model`; unless" in said[0]


def test_heads_for_which_prompts_cannot_be_read_are_refused(files, tmp_path):
    other = tiny_model()
    other.save_pretrained(tmp_path / "model")
    calibration_of(other, read=True).save(tmp_path / "bases", model="other", text=["random"])
    with pytest.raises(UserError, match="16 dims"):
        configured(files, {**files.settings, "bases": str(tmp_path / "bases")}, model=str(tmp_path / "model"))


def on_gpu(monkeypatch, *, kind: str = "cuda", capability: int = 90) -> None:
    """Let checks meet the platform that vLLM has on a GPU."""

    class Platform:
        device_name = "NVIDIA H100"
        is_cpu, is_cuda = staticmethod(lambda: False), staticmethod(lambda: kind == "cuda")
        has_device_capability = staticmethod(lambda least: capability >= least)

    monkeypatch.setattr(importlib.import_module("lowrank_kv_vllm.refusals"), "current_platform", Platform)


@pytest.mark.parametrize(
    ("changed", "platform", "switch", "block_size", "message"),
    [
        ({}, {}, "1", BLOCK, "CPUs so far, and vLLM runs on NVIDIA H100;.* set `untested_gpu: true` .*--untested-gpu"),
        ({"untested_gpu": True}, {"capability": 75}, "1", BLOCK, "since Ampere"),
        ({"untested_gpu": True}, {"kind": "rocm"}, "1", BLOCK, "vLLM's build for CPUs"),
        ({"untested_gpu": True}, {}, "0", BLOCK, "Triton's kernels: unset .LOWRANK_KV_TRITON, which is 0"),
    ],
)
def test_gpus_are_refused(files, monkeypatch, changed, platform, switch, block_size, message):
    monkeypatch.setenv("LOWRANK_KV_TRITON", switch)
    on_gpu(monkeypatch, **platform)
    with pytest.raises(UserError, match=message):
        configured(files, {**files.settings, **changed}, block_size=block_size)


def test_a_gpu_that_is_asked_for_is_served_with_a_warning_and_any_heads(files, tmp_path, monkeypatch, caplog):
    on_gpu(monkeypatch)
    other = tiny_model()  # 16 dims
    other.save_pretrained(tmp_path / "model")
    calibration_of(other, read=True).save(tmp_path / "bases", model="model", text=["random"])
    settings = {**files.settings, "bases": str(tmp_path / "bases"), "untested_gpu": True}
    logging.getLogger("vllm.lowrank_kv").addHandler(caplog.handler)  # vLLM's loggers end at its own
    configured(files, settings, model=str(tmp_path / "model"))
    logging.getLogger("vllm.lowrank_kv").removeHandler(caplog.handler)
    assert "no GPU has ever run this plugin" in caplog.text


def test_the_runner_that_does_not_tell_where_prompts_end_is_refused(files, monkeypatch):
    """vLLM's build for CPUs cannot be asked for it, so it is put in place behind the configuration."""
    from vllm.config import VllmConfig

    from lowrank_kv_vllm.refusals import check

    config = configured(files, files.settings)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: True))
    with pytest.raises(UserError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        check(config, ServingConfig(**files.settings))


@pytest.mark.parametrize(("key", "value"), [("enable_dbo", True), ("ubatch_size", 2)])
def test_micro_batches_are_refused(files, monkeypatch, key, value):
    """On a CPU vLLM leaves out the one and refuses the other before, so they are put in place behind the configuration."""
    from lowrank_kv_vllm.refusals import check

    config, settings = configured(files, files.settings), ServingConfig(**files.settings)
    check(config, settings)
    monkeypatch.setattr(config.parallel_config, key, value)
    with pytest.raises(UserError, match="leave `enable_dbo` and `ubatch_size` out"):
        check(config, settings)


def test_a_model_with_sliding_windows_is_refused(files, tmp_path):
    windowed(tmp_path / "model")
    with pytest.raises(UserError, match="use a model without a window"):
        configured(files, files.settings, model=str(tmp_path / "model"))


def test_a_window_that_hides_nothing_is_refused_unless_it_is_off(files, tmp_path):
    windowed(tmp_path / "model", sliding_window=256)
    changed = {"model": str(tmp_path / "model")}
    with pytest.raises(UserError, match="a sliding window of 256 tokens, .*set `disable_sliding_window`"):
        configured(files, files.settings, **changed)
    configured(files, files.settings, **changed, disable_sliding_window=True)


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
        origin_of(ServingConfig(checkpoint=str(tmp_path / "checkpoint")))


def test_layers_that_are_coded_together_are_refused(files, tmp_path):
    model = tiny_model(head_dim=32, vocab_size=257)
    planned_model(model, 0.3, joint_layers=2)
    dynakv.save_compressor(model, tmp_path / "checkpoint")
    with pytest.raises(UserError, match="codes 2 layers together, and vLLM has pages of each layer by itself"):
        origin_of(ServingConfig(checkpoint=str(tmp_path / "checkpoint")))


def test_what_rebuilding_counts_for_is_a_calibrations_to_say(files, tmp_path):
    with pytest.raises(UserError, match="`rebuild_cost` must be left out with `checkpoint`, which says it; got 2"):
        configured(files, {"checkpoint": str(tmp_path / "checkpoint"), "rebuild_cost": 2})
    with pytest.raises(UserError, match="`rebuild_cost` must be 0 with `cache_dtype: model`"):
        configured(files, {**files.settings, "preset": "static-joint-pf", "rebuild_cost": 2, "page_margin": None})


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


def test_several_positions_of_a_token_are_refused(files, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    tiny_model(head_dim=32, vocab_size=257, rope_parameters=rope).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="several positions of a token"):
        configured(files, files.settings, model=str(tmp_path / "model"))


def test_neighbouring_dims_as_pairs_are_refused_before_the_engine_starts(files, tmp_path, monkeypatch):
    cohere(tmp_path / "model")
    with pytest.raises(UserError, match="this cohere model rotates neighbouring dims .*, as GPT-J does"):
        configured(files, files.settings, model=str(tmp_path / "model"))
    # Of families that transformers does not know only the model says so, once it is made. A first request would be too late.
    refusals = importlib.import_module("lowrank_kv_vllm.refusals")
    monkeypatch.setattr(refusals, "family_rotates_neighbours", lambda config: False)
    with (
        pytest.raises(UserError, match="the model rotates neighbouring dims"),
        serving(files, files.settings, model=str(tmp_path / "model")),
    ):
        pass


@pytest.mark.parametrize("family", ["gpt2", "gptj"])
def test_families_without_one_rotation_for_all_keys_are_refused(files, tmp_path, family):
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 257, "n_positions": 256, "eos_token_id": 0}
    config = AutoConfig.for_model(family, **shape, **({"rotary_dim": 16} if family == "gptj" else {}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=f"this {family} model has no `rope_parameters`"):
        configured(files, files.settings, model=str(tmp_path / "model"))


def test_a_cpu_without_compiled_code_is_refused(files, monkeypatch):
    monkeypatch.setattr(importlib.import_module("lowrank_kv_vllm.refusals"), "library", lambda: None)
    with pytest.raises(UserError, match="install a C compiler"):
        configured(files, files.settings)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attn_type", "encoder_only", "attend to later ones"),
        ("attn_type", "encoder_decoder", "attend to later ones"),
        ("attn_type", "attention_free", "has no attention"),
        ("is_mm_prefix_lm", True, "attend to later ones"),
        ("use_mla", True, r"latents of its own \(MLA\).*leave `lowrank_kv` out"),
    ],
)
def test_models_without_causal_keys_and_values_are_refused(files, monkeypatch, name, value, message):
    from vllm.config import ModelConfig

    from lowrank_kv_vllm.refusals import check

    config = configured(files, files.settings)
    monkeypatch.setattr(ModelConfig, name, property(lambda self: value))
    with pytest.raises(UserError, match=message):
        check(config, ServingConfig(**files.settings))


@pytest.mark.parametrize("shape", [JambaConfig, FalconH1Config])
def test_a_hybrid_model_is_told_by_its_layers(files, monkeypatch, shape):
    """A Falcon H1 has no layer that is attention alone."""
    from vllm.config import ModelConfig

    from lowrank_kv_vllm.refusals import check

    config = configured(files, files.settings)
    monkeypatch.setattr(ModelConfig, "attn_type", property(lambda self: "hybrid"))
    config.model_config.hf_text_config = shape()
    with pytest.raises(UserError, match=f"layers of this {shape.model_type} model keep a state"):
        check(config, ServingConfig(**files.settings))


def test_a_layer_that_asks_for_attention_of_its_own_is_refused(files):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    config = configured(files, files.settings)
    with set_current_vllm_config(config), pytest.raises(UserError, match="attention of its own"):
        Attention(4, 32, 1.0, num_kv_heads=2, prefix="model.layers.0.self_attn.attn", attn_backend=dict)


def test_sleeping_is_refused_on_a_gpu(files, monkeypatch):
    from lowrank_kv_vllm.refusals import check

    config = configured(files, files.settings)
    on_gpu(monkeypatch)
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", True)
    with pytest.raises(UserError, match="leave `enable_sleep_mode` out"):
        check(config, ServingConfig(**files.settings, untested_gpu=True))


@pytest.mark.parametrize("cache_dtype", ["fp8", "int8"])
def test_another_way_of_storing_is_refused_and_the_remedy_is_named(files, monkeypatch, cache_dtype):
    from lowrank_kv_vllm.refusals import check

    config = configured(files, files.settings)
    monkeypatch.setattr(config.cache_config, "cache_dtype", cache_dtype)  # as from `auto` and a model's own scales
    with pytest.raises(UserError, match="set `kv_cache_dtype` to float32"):
        check(config, ServingConfig(**files.settings))


def test_gates_of_which_only_the_mean_was_measured_are_refused(files, gated, tmp_path):
    model = with_compressor(gated)
    dynakv.save_compressor(model, tmp_path / "checkpoint", summary={"calibrated_threshold": {"hard_rate": 0.4}})
    with pytest.raises(UserError, match="keep in each layer, .*; run `lowrank-kv measure --checkpoint"):
        configured(files, {"checkpoint": str(tmp_path / "checkpoint")})
