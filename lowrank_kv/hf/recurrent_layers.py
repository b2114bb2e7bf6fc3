"""Layers of convolutions and recurrences, which keep one state for all tokens of a sequence.

Such a layer moves its state on in place and counts no tokens. Of a call that was cut short it cannot tell whether it has
read the tokens, nor can it give them back. A cache with such layers therefore notes when a call moves one of them, and
refuses further tokens until the whole call has run. The hooks are on the base model, which runs all layers.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from lowrank_kv.utils.errors import UserError

_HOOKS = "_recurrent_hooks"  # attribute of the base model: handles of its hooks


def is_recurrent(layer: Any) -> bool:
    """Whether a cache layer keeps one state for all tokens."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def has_recurrent_layers(config: PretrainedConfig) -> bool:
    """Whether a model of this configuration has such layers; `config` is that of its text decoder."""
    return any(map(is_recurrent, DynamicCache(config=config).layers))


def counts_tokens(layer: Any) -> bool:
    """Whether a cache layer holds tokens; others keep one state for all of them, or nothing."""
    return isinstance(layer, CacheLayerMixin) and layer.is_initialized


def check_forgets(layer: LinearAttentionCacheLayerMixin, removed: int, length: int) -> None:
    """Raise :class:`UserError` where a recurrent layer cannot give back its last `removed` tokens, so that `length` > 0 are
    left."""
    if not removed or not _has_states(layer):
        return
    if not layer.is_croppable:
        raise UserError(
            f"the cache cannot be cropped to {length} tokens: its recurrent layers cannot give tokens back; "
            f"read the text again after `cache.reset()`"
        )
    for index, states in layer.conv_states.items():
        kernel = layer.conv_kernel_size[index]
        if not layer.record_past or states.shape[-1] < removed + min(kernel, length):
            raise UserError(
                f"the cache cannot be cropped to {length} tokens: a convolution layer has forgotten those before the last "
                f"{kernel}; call `cache.activate_past_recording()` before the tokens that may be taken back, or read the "
                f"text again after `cache.reset()`"
            )


def forget(layer: LinearAttentionCacheLayerMixin, removed: int) -> None:
    """Give back the last `removed` tokens of a recurrent layer, after :func:`check_forgets`."""
    if layer.record_past and _has_states(layer):
        layer.crop(-removed)


def clear(layer: LinearAttentionCacheLayerMixin) -> None:
    """Forget all tokens of a recurrent layer. Its own `reset` keeps the number of sequences."""
    for states in (layer.conv_states, layer.recurrent_states):
        states.update(dict.fromkeys(states))
    for are_there in (
        layer.is_conv_states_initialized,
        layer.is_recurrent_states_initialized,
        layer.has_previous_state,
    ):
        are_there.update(dict.fromkeys(are_there, False))


def _has_states(layer: LinearAttentionCacheLayerMixin) -> bool:
    return any(layer.has_previous_state.values())


class WholeCalls(Cache):
    """A cache that refuses tokens after a call that moved a recurrent layer and was cut short."""

    _has_moved: bool | None = None  # whether the running call has moved a recurrent layer; None between calls

    @functools.cached_property
    def _has_recurrent_layers(self) -> bool:
        return any(map(is_recurrent, self.layers))

    @contextlib.contextmanager
    def whole_call(self) -> Iterator[None]:
        """A call whose layers cannot tell when they move, as in a compiled graph."""
        self.begin_call()
        self._has_moved = self._has_recurrent_layers
        yield
        self.end_call()

    def begin_call(self) -> None:
        """A call of all layers begins; refused as :meth:`check_not_cut_short` says."""
        self.check_not_cut_short()
        self._has_moved = False

    def check_not_cut_short(self) -> None:
        """Raise :class:`UserError` where a call was cut short after it had moved a recurrent layer."""
        if self._has_moved:
            raise UserError(
                "a call of this cache was cut short after recurrent layers had read its tokens, and they cannot give them "
                "back; read the text again after `cache.reset()`"
            )

    def end_call(self) -> None:
        """The call has run through all layers, or nothing is left of it."""
        self._has_moved = None

    # A decoded token moves the very state that a layer asks for. Up to transformers 5.20 a layer asks the cache only whether
    # there is one, and takes it itself.
    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        self._note_move()
        return super().has_previous_state(*args, **kwargs)

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self._note_move()
        return super().get_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self._note_move()
        return super().get_recurrent_state(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self._note_move()
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self._note_move()
        return super().update_recurrent_state(*args, **kwargs)

    def _note_move(self) -> None:
        if not torch.compiler.is_compiling() and self._has_moved is not None:
            self._has_moved = True


def hook_calls(model: PreTrainedModel) -> None:
    """Let the model tell caches where its calls begin and end, if it has recurrent layers; safe to call again."""
    base, config = model.base_model, model.config.get_text_config(decoder=True)
    if _HOOKS not in base.__dict__ and has_recurrent_layers(config):
        base.__dict__[_HOOKS] = (
            base.register_forward_pre_hook(_begin_call, with_kwargs=True),
            base.register_forward_hook(_end_call, with_kwargs=True),
        )


def unhook_calls(model: PreTrainedModel) -> None:
    """Undo :func:`hook_calls`; a no-op on any other model."""
    for handle in model.base_model.__dict__.pop(_HOOKS, ()):
        handle.remove()


def _begin_call(base: nn.Module, args: tuple, kwargs: dict) -> None:
    for cache in _caches(args, kwargs):
        cache.begin_call()


def _end_call(base: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
    for cache in _caches(args, kwargs):
        cache.end_call()


def _caches(args: tuple, kwargs: dict) -> list[WholeCalls]:
    # A graph would note both at once; whoever compiles a call notes it around the graph.
    given = () if torch.compiler.is_compiling() else (*args, *kwargs.values())
    return [each for each in given if isinstance(each, WholeCalls)]
