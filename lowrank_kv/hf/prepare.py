"""Let a stock model run with compressed caches, and undo it."""

import itertools
import weakref

from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from lowrank_kv.hf.attention import (
    ATTENTION_NAME,
    PREPARED,
    PreparedAttention,
    begin_call,
    check_not_switched,
    is_prepared,
)
from lowrank_kv.hf.backends import check_backend, default_backend
from lowrank_kv.hf.default_cache import HOOKING, hook_generation, unhook_generation
from lowrank_kv.hf.geometry import attention_modules, check_model, geometry_of, model_within
from lowrank_kv.hf.recurrent_layers import hook_calls, unhook_calls
from lowrank_kv.hf.rotary import rotary_function
from lowrank_kv.utils.errors import UserError

_identities = itertools.count(1)
# A prepared model's config → a weak reference to the model.
_prepared_by = WeakIdKeyDictionary()


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Let every attention module of `model` run with a compressed cache; with any other cache nothing changes.

    Safe to call again. Switches the model to the ``lowrank_kv`` attention, which runs the model's own (sdpa, eager or
    flash_attention_2) underneath; :func:`restore` switches it back.

    Raises:
        UserError: the model wraps another, or its attention is another, or cannot be replaced.
    """
    check_model(model)
    check_own_config(model)
    with HOOKING:
        previous, around = _attention_of(model)
        if previous != ATTENTION_NAME:
            check_backend(previous)
        geometry, identity = geometry_of(model), next(_identities)
        for module in attention_modules(model).values():
            if PREPARED not in module.__dict__:
                # A model loaded from a full checkpoint never had another.
                names = [default_backend(model) if each == ATTENTION_NAME else each for each in (previous, around)]
                rotary = rotary_function(module)
                # Last, as `restore` does not know it before the next line.
                hook = module.register_forward_pre_hook(begin_call, with_kwargs=True)
                setattr(module, PREPARED, PreparedAttention(module, geometry, rotary, hook, *names, identity))
            else:
                check_not_switched(module)
        if previous != ATTENTION_NAME:
            model.set_attn_implementation(_of_the_decoder(model, ATTENTION_NAME, ATTENTION_NAME))
            if _attention_of(model) != (ATTENTION_NAME, ATTENTION_NAME):
                raise UserError(
                    f"{type(model).__name__} does not let its attention be replaced; this family is not supported"
                )
        _prepared_by[model.config] = weakref.ref(model)
        hook_generation(model)
        hook_calls(model)
    return model


def check_own_config(model: PreTrainedModel) -> None:
    """Raise :class:`UserError` where a stock model shares its `config` with a prepared one: switching the attention of that
    one has switched its own."""
    if model.config._attn_implementation != ATTENTION_NAME or is_prepared(model):
        return
    other = _prepared_by.get(model.config, lambda: None)()
    if other is not None and other is not model:
        raise UserError(
            "the model shares its `config` object with another model, which is compressed, and so runs by the attention of "
            "that one; make each model from a config of its own, `copy.deepcopy(config)`"
        )


def _attention_of(model: PreTrainedModel) -> tuple[str, str]:
    """The names of the attention of a model's text decoder, and of the model around it."""
    return model.config.get_text_config(decoder=True)._attn_implementation, model.config._attn_implementation


def _of_the_decoder(model: PreTrainedModel, attention: str, around: str) -> str | dict[str, str]:
    """The attention of a model's text decoder and of the model around it, as `set_attn_implementation` takes it; encoders of
    images or sounds keep theirs."""
    config = model.config
    text = config.get_text_config(decoder=True)
    parts = [name for name in config.sub_configs if getattr(config, name, None) is text]
    return {"": around, parts[0]: attention} if parts else attention


def restore(model: PreTrainedModel) -> None:
    """Undo :func:`prepare` and :func:`set_default_cache`; a no-op on a model that was never prepared. A wrapper of the model
    serves as well (:func:`model_within`), and may have been put around it since."""
    model = model_within(model)
    with HOOKING:
        names = None
        unhook_generation(model)
        unhook_calls(model)
        for module in attention_modules(model).values():
            prepared: PreparedAttention | None = module.__dict__.pop(PREPARED, None)
            if prepared is not None:
                prepared.hook.remove()
                names = prepared.previous, prepared.around
        if names is not None:
            model.set_attn_implementation(_of_the_decoder(model, *names))
