"""Which cache a prepared model fills, in `generate()` and in plain calls, and which caches it refuses.

The hooks are on the instance: the class, and every other model of it, stay as they were.
"""

import dataclasses
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel
from transformers.generation import GenerationMode

from lowrank_kv.hf.attention import is_prepared
from lowrank_kv.hf.cache_argument import CACHE, cache_name
from lowrank_kv.hf.drafts import check_drafts, hook_drafts, prompt_length, unhook_drafts
from lowrank_kv.utils.errors import UserError

_DEFAULT = "_default_cache"  # attribute of the base model: a _DefaultCache

HOOKING = threading.Lock()  # threads may share a model: one at a time changes its hooks


@dataclasses.dataclass(eq=False)  # each is itself, as a key of _PlainCalls
class _DefaultCache:
    """What a model fills by itself.

    Attributes:
        make: an empty cache of the class.
        is_on_base: whether it was set on the base model itself.
        hook: of the base model's calls.
        latest_read: another object for each call that was given a cache.
    """

    cache_class: type[Cache]
    make: Callable[[PreTrainedModel], Cache]
    is_on_base: bool
    hook: RemovableHandle
    latest_read: object = dataclasses.field(default_factory=object)

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> "_DefaultCache | None":
        return model.base_model.__dict__.get(_DEFAULT)


class _PlainCalls(threading.local):
    """A thread's latest calls without a cache. They are no state of the model, which threads share: the first call of one
    thread does not follow that of another.

    Attributes:
        unread: what a model fills by itself → its `latest_read` when this thread's latest such call filled a cache.
    """

    def __init__(self):
        self.unread: weakref.WeakKeyDictionary[_DefaultCache, object] = weakref.WeakKeyDictionary()


_PLAIN_CALLS = _PlainCalls()


def hook_generation(model: PreTrainedModel) -> None:
    """Let `generate()` refuse a compressed cache beside a `cache_implementation`, and continuous batching altogether; with
    drafts it reads what the cache does not hold."""
    if model.can_generate():
        model._prepare_cache_for_generation = functools.partial(_prepare_cache_for_generation, model)
        model.init_continuous_batching = functools.partial(_init_continuous_batching, model)
        hook_drafts(model)


def unhook_generation(model: PreTrainedModel) -> None:
    """Undo :func:`hook_generation` and :func:`set_default_cache`; a no-op on any other model."""
    for name in ("_prepare_cache_for_generation", "init_continuous_batching"):
        model.__dict__.pop(name, None)
    unhook_drafts(model)
    _remove_default_cache(model)


def set_default_cache(
    model: PreTrainedModel, cache_class: type[Cache], make_cache: Callable[[PreTrainedModel], Cache] | None = None
) -> PreTrainedModel:
    """Let a prepared model fill a compressed cache wherever it would fill a `DynamicCache`.

    Args:
        cache_class: a subclass of :class:`lowrank_kv.hf.cache.lowrank_cache.LowRankCache`; all other caches are refused.
        make_cache: an empty cache of that class for a model, which may be the base model; None for
            ``cache_class.from_model``.
    """
    base, make = model.base_model, make_cache or cache_class.from_model
    with HOOKING:
        _remove_default_cache(model)
        hook = base.register_forward_pre_hook(_make_cache, with_kwargs=True)
        base.__dict__[_DEFAULT] = _DefaultCache(cache_class, make, is_on_base=model is base, hook=hook)
    return model


def has_default_cache(model: PreTrainedModel) -> bool:
    """Whether :func:`set_default_cache` was called on the model."""
    return _DefaultCache.of_model(model) is not None


def note_read(model: PreTrainedModel) -> None:
    """Say that a call which the model's hooks are not asked about, since it runs compiled, is given a cache."""
    default = _DefaultCache.of_model(model)
    if default is not None:
        default.latest_read = object()


def new_default_cache(model: PreTrainedModel) -> Cache:
    """An empty cache as the model makes it by itself. Raises :class:`UserError` where it makes stock ones."""
    default = _DefaultCache.of_model(model)
    if default is None:
        raise UserError("the model is not compressed; call lowrank_kv.compress(model, …) first")
    return default.make(model)


def _remove_default_cache(model: PreTrainedModel) -> None:
    default = model.base_model.__dict__.pop(_DEFAULT, None)
    if default is not None:
        default.hook.remove()


def _prepare_cache_for_generation(
    self: PreTrainedModel, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
) -> None:
    name = cache_name(model_kwargs)
    cache = model_kwargs.get(name)
    default = _DefaultCache.of_model(self)
    is_compressed = default is not None or hasattr(cache, "compressed_layers")
    if is_compressed:
        _check_own_assistant(generation_config)
        _take_cache_implementation(generation_config)
        _check_used(cache, generation_config)
    if default is not None:
        _check_cache(cache, default.cache_class)
    if default is not None and cache is None and generation_config.use_cache is not False:
        model_kwargs[name] = cache = default.make(self)
    else:
        type(self)._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)
    if is_compressed and cache is not None:
        length = prompt_length(generation_config, model_kwargs)
        _check_something_new(cache, length)
        if GenerationMode.ASSISTED_GENERATION in args:
            check_drafts(self, cache.get_seq_length())
        cache.is_given_again = False  # also where an earlier `generate()` was cut short
        for layer in cache.compressed_layers():  # not by the cache, to which 0 takes back what was expected
            layer.expect_prompt(length)
        if generation_config.is_assistant:
            cache.activate_past_recording()


def _make_cache(base: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The pre-hook of a base model with a default cache."""
    default = base.__dict__[_DEFAULT]
    names = _argument_names(type(base))
    kwargs |= dict(zip(names, args, strict=False))
    args = args[len(names) :]
    name = cache_name(kwargs)
    cache, use_cache = kwargs.get(name), kwargs.get("use_cache")
    _check_cache(cache, default.cache_class, is_on_base=default.is_on_base)
    if cache is None and base.training:
        # A cache would be filled through the hard mask; training needs the soft one, which is the uncached path.
        kwargs["use_cache"] = False
    elif cache is None and (_uses_cache(base) if use_cache is None else use_cache):
        kwargs[name] = default.make(base)
        if not torch.compiler.is_compiling():
            _note_plain_call(default, kwargs[name])
    elif cache is not None and not torch.compiler.is_compiling():
        default.latest_read = object()
    return args, kwargs


def _note_plain_call(default: _DefaultCache, cache: Cache) -> None:
    """Warn who scores texts by calls that read no compressed token. A prompt whose cache is used has a second call."""
    if _PLAIN_CALLS.unread.pop(default, None) is default.latest_read:
        warnings.warn(
            f"two calls in a row were given no `{CACHE}`, and nothing has read the cache that the first one filled: with "
            f"prompts that are read exactly (`prefill`), the logits and the loss of such calls are the uncompressed "
            f"model's. To score a text through the cache, give its first tokens in one call and the others, with that "
            f"call's `{CACHE}`, in a second one, as `lowrank-kv compare` and `lowrank-kv lm-eval` do",
            stacklevel=2,
        )
    if cache.compressed_layers()[0].reads_prompts_exactly:
        _PLAIN_CALLS.unread[default] = default.latest_read


def _uses_cache(base: nn.Module) -> bool:
    """What a call without `use_cache` does; of a model that also reads images or sounds the text decoder says it."""
    return getattr(base.config.get_text_config(decoder=True), "use_cache", True)


@functools.cache
def _argument_names(base_class: type[nn.Module]) -> tuple[str, ...]:
    """Of the arguments of a base model that a caller may give by their places."""
    parameters = list(inspect.signature(base_class.forward).parameters.values())[1:]
    return tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)


def _check_cache(cache: Cache | None, cache_class: type[Cache], *, is_on_base: bool = False) -> None:
    if cache is not None and not isinstance(cache, cache_class):
        # `generate()` of a model around it makes its caches itself, and nobody passed this one.
        whole = "compress the whole model if generate() made this cache, else " if is_on_base else ""
        raise UserError(
            f"`{CACHE}` is a {type(cache).__name__}, which would bypass the compressor of this model; {whole}leave it "
            f"out or pass one of {cache_class.__name__}, or take the compression off first: lowrank_kv.uncompress(model)"
        )


def _check_own_assistant(generation_config: Any) -> None:
    layers = getattr(generation_config, "assistant_early_exit", None)
    if layers is not None:
        raise UserError(
            f"`assistant_early_exit={layers}` drafts with the first layers of the model, and its compressed cache is for "
            f"all of its layers; give another model as `assistant_model`, or draft by `prompt_lookup_num_tokens`"
        )


def _take_cache_implementation(generation_config: Any) -> None:
    """Remove the ``cache_implementation`` from the configuration of a `generate()`, which refuses one beside a cache.

    Raises:
        UserError: it names another cache than the compressed one.
    """
    name, generation_config.cache_implementation = generation_config.cache_implementation, None
    if name not in (None, "dynamic"):
        raise UserError(
            f"`cache_implementation={name!r}` would bypass the compressed cache; leave it unset, in the call and in "
            f"`model.generation_config`, or generate uncompressed after lowrank_kv.uncompress(model)"
        )


def _check_used(cache: Cache | None, generation_config: Any) -> None:
    if cache is not None and generation_config.use_cache is False:
        raise UserError(
            f"`use_cache=False` reads the whole text at every token, and `{CACHE}` would store it every time; leave out one "
            f"of the two"
        )


def _check_something_new(cache: Cache, length: int) -> None:
    """Raise :class:`UserError` where a prompt of so many tokens leaves none to read, since the cache holds as many: its text
    would be stored a second time. The length is 0 where nothing says it."""
    held = cache.get_seq_length()
    if 0 < length <= held:
        raise UserError(
            f"`generate()` was given a text of {length} tokens, and the cache holds {held} already, so that none is new; "
            f"give the whole text with more behind it (or only what is new and an `attention_mask` as long as the whole), "
            f"or call `cache.crop({length - held - 1})` first, which keeps {length - 1} tokens, or take an empty cache"
        )


def _init_continuous_batching(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Every way into continuous batching starts here."""
    if not is_prepared(self):  # its base model was given to be restored, which does not know of it
        unhook_generation(self)
        return self.init_continuous_batching(*args, **kwargs)
    raise UserError(
        "continuous batching (`generate_batch`, `cache_implementation='paged'`) keeps keys and values uncompressed in a "
        "paged cache of its own; call generate() with a left-padded batch, or take the compression off first: "
        "lowrank_kv.uncompress(model)"
    )
