"""Make a model use a compressed cache of its own accord, in `generate()` and in plain calls.

Both hooks are on the instance: the class, and every other model of it, stay as they were.
"""

import functools
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lowrank_kv.hf.attention import prepare
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.unsupported_generation import prompt_length, take_cache_implementation
from lowrank_kv.utils.errors import UserError

_STATE = "_compressed_serving"  # attribute of the base model: (cache class, handle of its forward pre-hook)


def serve_compressed(model: PreTrainedModel, cache_class: type[LowRankCache]) -> PreTrainedModel:
    """From now on the model fills a ``cache_class.from_model(model)`` wherever it would fill a `DynamicCache`."""
    prepare(model)
    stop_serving(model)
    model._prepare_cache_for_generation = functools.partial(_prepare_cache_for_generation, model)
    base = model.base_model
    base.__dict__[_STATE] = (cache_class, base.register_forward_pre_hook(_make_cache, with_kwargs=True))
    return model


def stop_serving(model: PreTrainedModel) -> None:
    """Undo :func:`serve_compressed`; a no-op on a model that was never served."""
    model.__dict__.pop("_prepare_cache_for_generation", None)
    state = model.base_model.__dict__.pop(_STATE, None)
    if state is not None:
        state[1].remove()


def _prepare_cache_for_generation(
    self: PreTrainedModel, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
) -> None:
    take_cache_implementation(generation_config)
    cache_class = self.base_model.__dict__[_STATE][0]
    cache = model_kwargs.get("past_key_values")
    if cache is not None:
        _check_cache(cache, cache_class)
    elif generation_config.use_cache is not False:
        model_kwargs["past_key_values"] = cache = cache_class.from_model(self)
    if cache is not None:
        cache.expect_prompt(prompt_length(generation_config, model_kwargs))
        if generation_config.is_assistant:
            cache.activate_past_recording()


def _make_cache(base: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    cache_class = base.__dict__[_STATE][0]
    cache = kwargs.get("past_key_values")
    use_cache = kwargs.get("use_cache")
    if cache is not None:
        _check_cache(cache, cache_class)
    elif base.training:
        # A cache would be filled through the hard mask; training needs the soft one, which is the uncached path.
        kwargs["use_cache"] = False
    elif base.config.use_cache if use_cache is None else use_cache:
        kwargs["past_key_values"] = cache_class.from_model(base)
    return args, kwargs


def _check_cache(cache: Any, cache_class: type[LowRankCache]) -> None:
    if not isinstance(cache, cache_class):
        raise UserError(
            f"`past_key_values` is a {type(cache).__name__}, which would bypass the compressor of this model; pass "
            f"{cache_class.__name__}.from_model(model) or nothing, or detach the compressor first"
        )
