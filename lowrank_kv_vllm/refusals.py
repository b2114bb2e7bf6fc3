"""What cannot be served, found before the engine starts."""

import os

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from lowrank_kv.hf.geometry import KVGeometry, geometry_of_config, warning_of_another
from lowrank_kv.hf.recurrent_layers import has_recurrent_layers
from lowrank_kv.hf.rotary import family_rotates_neighbours
from lowrank_kv.ops.native.library import WITHOUT_IT, library
from lowrank_kv.ops.triton.availability import SWITCH, may_launch
from lowrank_kv.stores.arena import MARK_BYTES
from lowrank_kv.utils.errors import UserError
from lowrank_kv_vllm.backend import PagedBackend
from lowrank_kv_vllm.plans import first_layer, origin_of
from lowrank_kv_vllm.prompts import HEAD_SIZES
from lowrank_kv_vllm.rotation import OF_NEIGHBOURS, ROPE_TYPES
from lowrank_kv_vllm.settings import KEY, ServingConfig
from lowrank_kv_vllm.statistics import logger


def check(config: VllmConfig, settings: ServingConfig) -> None:
    """Raise :class:`UserError` where a configuration cannot be served."""
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    if not current_platform.is_cpu():
        _check_gpu(settings)
    if cache.block_size is not None and cache.block_size % MARK_BYTES:
        raise UserError(
            f"`block_size` is {cache.block_size}, and kernels read pages a multiple of {MARK_BYTES} bytes apart; set it to "
            f"128"
        )
    if config.use_v2_model_runner:
        raise UserError(
            "vLLM's second model runner does not tell where prompts end; set VLLM_USE_V2_MODEL_RUNNER=0 in the environment, "
            "with which it uses its first"
        )
    if parallel.use_ubatching:
        raise UserError("micro-batches are not told where prompts end; leave `enable_dbo` and `ubatch_size` out")
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        count = getattr(parallel, key)
        if count > 1:
            raise UserError(
                f"`{key}` is {count}, but coefficients are joint over all KV heads and cannot be divided among workers; "
                f"leave it at 1, or start several servers"
            )
    if model.dtype not in PagedBackend.supported_dtypes:
        served_in = " or ".join(map(_name, PagedBackend.supported_dtypes))
        raise UserError(f"`dtype` is {_name(model.dtype)}; compressed pages are served in {served_in}")
    if cache.cache_dtype not in ("auto", _name(model.dtype)):
        raise UserError(
            f"`kv_cache_dtype` is {cache.cache_dtype!r}, as it was set or as `auto` reads it from the model's checkpoint, "
            f"but pages are stored as `{KEY}` says, and exact tokens in the model's dtype; set `kv_cache_dtype` to "
            f"{_name(model.dtype)}"
        )
    attention = config.attention_config
    own = PagedBackend.get_name()
    asked = attention.backend_per_kind or (None if attention.backend is None else attention.backend.name)
    if asked not in (None, own, {}):
        raise UserError(
            f"`attention_backend` is {asked}, but compressed pages are attended by this plugin's own; leave it out, or set "
            f"it to {own}"
        )
    if model.using_transformers_backend():
        raise UserError(
            f"`model_impl` is {model.model_impl!r}, with which vLLM runs this {model.hf_text_config.model_type} model by "
            f"the code of transformers, which does not tell the plugin how it rotates keys; set `model_impl` to vllm "
            f"(`--model-impl vllm`), or serve a model of another family, where vLLM has no code of its own for this one"
        )
    if config.lora_config is not None:
        raise UserError(
            "`enable_lora` is true, but adapters change keys and values, for which bases were not made; leave it out, or "
            "merge the adapter into the model and calibrate that"
        )
    if config.kv_transfer_config is not None:
        raise UserError("KV transfer is not tested with compressed pages; leave `kv_transfer_config` out")
    if config.speculative_config is not None and config.speculative_config.method != "ngram":
        raise UserError(
            f"`speculative_config` has `method: {config.speculative_config.method}`, whose drafter has a cache of its own; "
            f"set `method` to ngram, or leave `speculative_config` out"
        )
    if model.enable_sleep_mode and not current_platform.is_cpu():  # vLLM ignores it on a CPU
        raise UserError("sleep mode gives back memory in which the bases are; leave `enable_sleep_mode` out")
    if model.use_mla:
        raise UserError(
            f"`model` is {model.model}, which keeps latents of its own (MLA) and needs no other compression; leave "
            f"`{KEY}` out, or serve another model"
        )
    if model.attn_type == "attention_free":
        raise UserError(
            f"`model` is {model.model}, which has no attention and so no keys and values; leave `{KEY}` out"
        )
    # One that is hybrid is told by its layers.
    if model.attn_type in ("encoder_only", "encoder_decoder") or model.is_mm_prefix_lm:
        raise UserError(
            f"`model` is {model.model}, whose tokens attend to later ones, too, and compressed pages are read causally; "
            f"serve a decoder"
        )
    if current_platform.is_cpu() and library() is None:
        raise UserError(f"compressed pages need compiled code on a CPU: {WITHOUT_IT}")
    _check_model(config, settings)


def _check_gpu(settings: ServingConfig) -> None:
    found = f"compressed pages are served on CPUs so far, and vLLM runs on {current_platform.device_name}"
    if not current_platform.is_cuda():
        raise UserError(f"{found}; use vLLM's build for CPUs")
    if not settings.untested_gpu:
        raise UserError(
            f"{found}; no NVIDIA GPU has run this plugin yet: set `untested_gpu: true` (`lowrank-kv serve --untested-gpu`) "
            f"to serve on one, or use vLLM's build for CPUs"
        )
    if not current_platform.has_device_capability(80):
        raise UserError(f"{found}, on which the kernels do not run; use an NVIDIA GPU since Ampere")
    if not may_launch():
        remedy = f"unset ${SWITCH}, which is 0" if os.environ.get(SWITCH) == "0" else "install `triton`"
        raise UserError(f"compressed pages on a GPU are read by Triton's kernels: {remedy}")
    logger.warning(
        "`untested_gpu`: no GPU has ever run this plugin, and its kernels only in tests. Compare the texts with those of "
        "`generate()` (docs/serving.md) before you use them."
    )


def _check_model(config: VllmConfig, settings: ServingConfig) -> None:
    text_config = config.model_config.hf_text_config
    if has_recurrent_layers(text_config):
        raise UserError(
            f"layers of this {text_config.model_type} model keep a state, for which vLLM has pages of another kind; serve a "
            f"model of full attention"
        )
    geometry, layers = geometry_of_config(text_config), text_config.num_hidden_layers
    if len(geometry.layers) < layers:
        others = layers - len(geometry.layers)
        raise UserError(
            f"{others} of the {layers} layers of this {text_config.model_type} model have a sliding window, which vLLM "
            f"would keep in pages of another kind; serve a model of full attention"
        )
    if (window := config.cache_config.sliding_window) is not None:
        raise UserError(
            f"layers of this {text_config.model_type} model have a sliding window of {window} tokens, no less than "
            f"`max_model_len`, and vLLM would still keep pages of another kind; set `disable_sliding_window`"
        )
    if current_platform.is_cpu() and geometry.head_dim not in HEAD_SIZES:
        raise UserError(
            f"heads of this {text_config.model_type} model have {geometry.head_dim} dims, and vLLM's attention on CPUs, by "
            f"which prompts are read, is made for {', '.join(map(str, HEAD_SIZES))}"
        )
    rope = getattr(text_config, "rope_parameters", None) or {}
    ropes = [each for each in (rope, *rope.values()) if isinstance(each, dict)]  # one, or one for each kind of layer
    if any("mrope_section" in each for each in ropes):
        raise UserError(
            f"this {text_config.model_type} model rotates keys by several positions of a token, for images and videos, and "
            f"pages know one; serve a model of text"
        )
    for kind in sorted({each.get("rope_type", "default") for each in ropes} - ROPE_TYPES):
        raise UserError(
            f"this {text_config.model_type} model rotates keys by `rope_type: {kind}`, whose angles do not depend on the "
            f"position alone; served are {', '.join(sorted(ROPE_TYPES))}"
        )
    _check_family(text_config)
    made_for, made_on, what, remedy = origin_of(settings)
    geometry.check_equal(made_for, what)
    if current_platform.is_cpu():  # elsewhere vLLM may fork this process, and torch's threads do not outlive that
        _check_pages(config, settings, geometry)
    if warning := warning_of_another(config.model_config.model, made_on, what, remedy):
        logger.warning(warning)


def _check_family(text_config: PreTrainedConfig) -> None:
    """What transformers' code of a family tells about its rotation. Of a family that it does not know only the model says it
    once it is loaded (:func:`lowrank_kv_vllm.rotation.rotation_of_model`), in a process whose errors vLLM only logs."""
    if type(text_config) in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(text_config, "rope_parameters", None):
        raise UserError(
            f"the configuration of this {text_config.model_type} model has no `rope_parameters`, and pages are served for "
            f"models that rotate all keys by one table; serve a model such as Llama"
        )
    if family_rotates_neighbours(text_config):
        raise UserError(f"this {text_config.model_type} model {OF_NEIGHBOURS}")


def _check_pages(config: VllmConfig, settings: ServingConfig, geometry: KVGeometry) -> None:
    """Make the first layer's page, as the worker makes all once it has loaded the model."""
    dtype = config.model_config.dtype
    found = first_layer(settings, dtype)
    [layer] = found.layers
    found.layout(layer, block_size=config.cache_config.block_size, sink_bytes=geometry.width * dtype.itemsize)


def _name(dtype: torch.dtype) -> str:
    """As vLLM's options call it."""
    return str(dtype).removeprefix("torch.")
