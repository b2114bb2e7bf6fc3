"""Ways of generating that keep keys and values in a cache of their own, refused on a prepared model by name.

The hooks are on the instance: the class, and every other model of it, stay as they were.
"""

import functools
from typing import Any

from transformers import PreTrainedModel

from lowrank_kv.utils.errors import UserError


def take_cache_implementation(generation_config: Any) -> None:
    """Take the ``cache_implementation`` out of what a `generate()` goes by: beside a cache it takes none.

    Raises:
        UserError: it asks for another cache than the compressed one.
    """
    name, generation_config.cache_implementation = generation_config.cache_implementation, None
    if name not in (None, "dynamic"):
        raise UserError(
            f"`cache_implementation={name!r}` would bypass the compressed cache; leave it unset, or detach the compressor "
            f"to generate uncompressed"
        )


def prompt_length(generation_config: Any, model_kwargs: dict) -> int:
    """Where the prompt of a `generate()` ends, as it prepares its cache; 0 where it does not say."""
    mask = model_kwargs.get("attention_mask")
    # A mask without padding is dropped before this, and its length noted.
    return getattr(generation_config, "_mask_length", 0) if mask is None else mask.shape[1]


def refuse_other_caches(model: PreTrainedModel) -> None:
    """Let `generate()` refuse a compressed cache beside a `cache_implementation`, and continuous batching altogether."""
    if model.can_generate():
        # A model that makes its own compressed caches has a stricter hook already.
        model.__dict__.setdefault(
            "_prepare_cache_for_generation", functools.partial(_prepare_cache_for_generation, model)
        )
        model.init_continuous_batching = functools.partial(_init_continuous_batching, model)


def allow_other_caches(model: PreTrainedModel) -> None:
    """Undo :func:`refuse_other_caches`; a no-op on any other model."""
    for name in ("_prepare_cache_for_generation", "init_continuous_batching"):
        model.__dict__.pop(name, None)


def _prepare_cache_for_generation(
    self: PreTrainedModel, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
) -> None:
    # A prepared model generates uncompressed, in whatever cache it is told to, until it is given a compressed one.
    cache = model_kwargs.get("past_key_values")
    if hasattr(cache, "compressed_layers"):
        take_cache_implementation(generation_config)
        cache.expect_prompt(prompt_length(generation_config, model_kwargs))
    type(self)._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)


def _init_continuous_batching(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    """Every way into continuous batching starts here."""
    raise UserError(
        "continuous batching (`generate_batch`, `cache_implementation='paged'`) keeps keys and values uncompressed in a "
        "paged cache of its own; call generate() with a left-padded batch, or take the compression off first with "
        "dynakv.detach(model) or lowrank_kv.hf.attention.restore(model)"
    )
