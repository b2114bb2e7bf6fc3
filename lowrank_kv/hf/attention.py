"""The attention function that compressed models run on, and the hook that tells it of the running call.

transformers calls a registered attention function with rotated q, k, v and a mask, but with neither the cache nor the
rotation. A forward pre-hook on each attention module sees both. It begins the call of the cache layer and adds an object to
the module's keyword arguments, which modules pass on to their attention function; the object's `attend` finishes the call.
Nothing of a call is kept on the model, so that threads may share it.

Shapes: B batch, H query heads, G KV heads, Q queries, T keys, D head dim.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, EncoderDecoderCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lowrank_kv.hf.backends import MASKED_BACKENDS, backend
from lowrank_kv.hf.cache.layer import CallContext, CompressedLayer
from lowrank_kv.hf.cache_argument import cache_name
from lowrank_kv.hf.call_checks import check_shape, objection_to_call, objection_to_keywords, refuse
from lowrank_kv.hf.compiled_ops import GraphCall, GraphHandle, outside_graphs
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.hf.geometry import KVGeometry, attention_modules
from lowrank_kv.hf.rope import Rope
from lowrank_kv.ops.gradients import without_gradients
from lowrank_kv.utils.errors import UserError

ATTENTION_NAME = "lowrank_kv"
PREPARED = "lowrank_kv"  # attribute of an attention module that holds its PreparedAttention
TRANSFORM = "kv_compressor"  # submodule of an attention module that compresses k and v where there is no cache
CALL = "lowrank_call"  # keyword argument of the attention function: how the running call attends
# Keyword argument of the decoder, which it passes on: positions of its tokens, where it keeps `position_ids` to itself.
POSITIONS = "lowrank_positions"
REBUILT = "lowrank_rebuilt"  # keyword argument of the model: what compressors of several layers rebuilt before the call

Observer = Callable[[Tensor, Tensor, Tensor, "Rope | None"], None]


@dataclasses.dataclass
class PreparedAttention(GraphHandle):
    """What an attention module needs besides its weights.

    Attributes:
        module: the attention module.
        geometry: of the model.
        apply_rotary: the family's rotary function; None for a family that has none.
        hook: the handle of the module's pre-hook.
        previous: name of the text decoder's attention before it was prepared; it still runs underneath.
        around: that of the model around the decoder, which may be another where there are encoders of images or sounds.
        identity: of the model since it was prepared, to tell its caches from those of another; a copy has the same.
        observer: is shown (q, rotated k, v, rope) of every uncached call, for calibration.
        exact_tokens: which tokens a query of an uncached call sees past the module's compressor; None for none.
    """

    module: nn.Module
    geometry: KVGeometry
    apply_rotary: Callable | None
    hook: RemovableHandle
    previous: str
    around: str
    identity: int
    observer: Observer | None = None
    exact_tokens: ExactTokens | None = None

    def set_exact_tokens(self, exact_tokens: ExactTokens | None) -> None:
        """Set :attr:`exact_tokens`.

        Raises:
            UserError: the model's own attention takes no mask in which queries see different tokens.
        """
        if exact_tokens is not None and self.previous not in MASKED_BACKENDS:
            raise UserError(
                f"attention `{self.previous}` cannot let each query see other tokens exactly; load the model with one of "
                f"{', '.join(MASKED_BACKENDS)}"
            )
        self.exact_tokens = exact_tokens

    @functools.cached_property
    def is_compressible(self) -> bool:
        """Whether a compressed cache may have a layer for this module."""
        return self.module.layer_idx in self.geometry.layers

    @property
    def is_bare(self) -> bool:
        """Whether nothing reads or changes keys and values where there is no compressed cache."""
        return self.observer is None and TRANSFORM not in self.module._modules

    def rope(self, embeddings: tuple[Tensor, Tensor] | None, position_BT: Tensor | None) -> Rope | None:
        """The rotation of a call's tokens; None for a family that has none."""
        if embeddings is None or self.apply_rotary is None:
            return None
        return Rope(self.apply_rotary, *embeddings, position_BT=position_BT)

    def call_context(
        self, embeddings: tuple[Tensor, Tensor] | None, position_BT: Tensor | None, mask: Tensor | None
    ) -> CallContext:
        """The context of a call, from the arguments that transformers passes to an attention module.

        Raises:
            UserError: the mask does more than hide tokens.
        """
        return CallContext(self.rope(embeddings, position_BT), _boolean(mask))

    def attend(self, layer: CompressedLayer, query: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, None]:
        """Attention over all tokens of a cache layer.

        Raises:
            UserError: the call asks for more than the compressed attention computes.
        """
        refuse(objection_to_keywords(self.module, kwargs))
        return layer.attend(self.module, query, _boolean(mask), backend(self.previous), **kwargs)


@dataclasses.dataclass(frozen=True)
class _CachedCall:
    """A call that attends over the tokens of a compressed cache layer."""

    layer: CompressedLayer

    @outside_graphs
    def attend(
        self, prepared: PreparedAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        self.layer.stored.take(prepared.module, key, value)
        output, weights = prepared.attend(self.layer, query, mask, **kwargs)
        if output.requires_grad:  # by way of the queries, or read exactly
            return output, weights
        return without_gradients(output, key, value, kwargs.get("s_aux")), weights


@dataclasses.dataclass(frozen=True)
class _UncachedCall:
    """A call without a compressed cache, whose keys and values something observes or compresses."""

    rope: Rope | None
    position_BT: Tensor | None
    rebuilt: Mapping[int, Any] | None = None

    @outside_graphs
    def attend(
        self, prepared: PreparedAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        check_shape(key, value, prepared.geometry)
        if prepared.observer is not None:
            prepared.observer(query, key, value, self.rope)
        transform = prepared.module._modules.get(TRANSFORM)
        if transform is not None:
            exact = key, value
            more = () if self.rebuilt is None else (self.rebuilt,)
            key, value, *_ = transform(key, value, self.rope, self.position_BT, *more)  # hooks read its other outputs
            if prepared.exact_tokens is not None:
                compressed, seen = (key, value), _boolean(mask)
                key, value, mask = prepared.exact_tokens.joined(exact, compressed, self.position_BT, seen)
        return backend(prepared.previous)(prepared.module, query, key, value, mask, **kwargs)


def is_prepared(model: PreTrainedModel) -> bool:
    """Whether :func:`lowrank_kv.hf.prepare.prepare` was called on the model."""
    return any(PREPARED in module.__dict__ for module in attention_modules(model).values())


def has_compressors(model: PreTrainedModel) -> bool:
    """Whether some attention module of the model compresses its keys and values where there is no cache."""
    return any(TRANSFORM in module._modules for module in attention_modules(model).values())


def begin_call(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The pre-hook of an attention module."""
    check_not_switched(module)
    prepared: PreparedAttention = getattr(module, PREPARED)
    told_BT = kwargs.pop(POSITIONS, None)  # attention functions do not know it
    if not prepared.is_compressible:
        return None
    name = cache_name(kwargs)
    layer = _compressed_layer(module, kwargs.get(name))
    if layer is None:
        if prepared.is_bare:
            return None
        kwargs[CALL] = _begin_uncached(prepared, kwargs, told_BT)
    elif torch.compiler.is_compiling() and layer.is_initialized and _num_tokens(args, kwargs) == 1:
        # Other calls leave the graph: a prompt's attention may be of any kind, and a break costs it little.
        kwargs[CALL] = kwargs[name] = GraphCall(kwargs[name], layer, prepared, kwargs)
    else:
        kwargs[CALL] = _begin_cached(prepared, layer, kwargs)
    return args, kwargs


def _compressed_layer(module: nn.Module, cache: Any) -> CompressedLayer | None:
    """The layer of a compressed cache that a module's call fills; None for any other cache."""
    if isinstance(cache, EncoderDecoderCache):
        _check_not_wrapped(module, cache)
        return None
    # A DynamicCache made without a config has no layers before their first tokens come.
    if cache is None or module.layer_idx >= len(cache.layers):
        return None
    layer = cache.layers[module.layer_idx]
    return layer if isinstance(layer, CompressedLayer) else None


def _check_not_wrapped(module: nn.Module, cache: EncoderDecoderCache) -> None:
    if any(isinstance(layer, CompressedLayer) for layer in cache.self_attention_cache.layers):
        raise UserError(
            f"{type(module).__name__} wraps its cache for an encoder beside it, and a compressed cache serves decoders "
            f"only; use a model of another family, or configure this one without cross-attention"
        )


def _num_tokens(args: tuple, kwargs: dict) -> int:
    return (args[0] if args else kwargs["hidden_states"]).shape[1]


@outside_graphs
def _begin_uncached(prepared: PreparedAttention, kwargs: dict, told_BT: Tensor | None) -> _UncachedCall:
    position_BT = kwargs.get("position_ids") if told_BT is None else told_BT
    rope = prepared.rope(kwargs.get("position_embeddings"), position_BT)
    return _UncachedCall(rope, position_BT, kwargs.pop(REBUILT, None))


@outside_graphs
def _begin_cached(prepared: PreparedAttention, layer: CompressedLayer, kwargs: dict) -> _CachedCall:
    call = (kwargs.get(name) for name in ("position_embeddings", "position_ids", "attention_mask"))
    layer.check_owner(prepared.identity)
    refuse(objection_to_call(prepared.module, kwargs))
    layer.begin_call(prepared.call_context(*call))
    return _CachedCall(layer)


def check_not_switched(module: nn.Module) -> None:
    """Raise :class:`UserError` where the attention of a prepared model was switched to another."""
    if module.config._attn_implementation != ATTENTION_NAME:
        raise UserError(
            f"the model's attention was switched to `{module.config._attn_implementation}` after it was prepared for "
            f"compression, which would bypass it; call model.set_attn_implementation('{ATTENTION_NAME}')"
        )


def lowrank_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    lowrank_call: _CachedCall | _UncachedCall | GraphCall | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: (B, H, Q, D) queries → ((B, Q, H, D), None).

    With a compressed cache layer it attends over all tokens of the layer. Without one it lets the module's compressor, if
    there is one, replace key and value, and runs the model's own attention; training and uncached evaluation go this way.
    """
    prepared: PreparedAttention | None = getattr(module, PREPARED, None)
    if prepared is None:
        raise UserError(
            f"attention `{ATTENTION_NAME}` needs a prepared model; call lowrank_kv.hf.prepare.prepare(model), and "
            f"give a model that is not to be compressed a `config` of its own: it may share that of one that is"
        )
    if lowrank_call is None:
        return backend(prepared.previous)(module, query, key, value, attention_mask, **kwargs)
    return lowrank_call.attend(prepared, query, key, value, attention_mask, **kwargs)


def _boolean(mask: Tensor | None) -> Tensor | None:
    """A mask as :class:`Backend` takes it. transformers passes a user's own four-dimensional one through as it is.

    Raises:
        UserError: it adds something to scores, where a compressed cache can only hide tokens.
    """
    if mask is not None and mask.shape[1] > 1:
        raise UserError(
            f"`attention_mask` hides other tokens from each head, {tuple(mask.shape)}, and a compressed cache takes one "
            f"mask for all heads; pass a mask of one head, or where the family makes such masks use another one"
        )
    if mask is None or mask.dtype == torch.bool:
        return mask
    shown = mask == 0
    if not mask.is_floating_point() or not bool((shown | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        raise UserError(
            f"a four-dimensional `attention_mask` for a compressed cache must be boolean, or of 0 and the least number of "
            f"its dtype: it can hide tokens, not weigh them; got {mask.dtype} with other values"
        )
    return shown


AttentionInterface.register(ATTENTION_NAME, lowrank_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
