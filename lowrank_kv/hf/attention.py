"""The attention function compressed models run on, and the hook that hands it what transformers does not.

transformers calls a registered attention function with rotated q, k, v and a mask, but with neither the cache nor the
rotation. A forward pre-hook on each attention module sees both; it leaves them for the attention function of the same call,
in the same thread, so that threads may share a model. Where `torch.compile` compiles the model, decoded tokens go another
way, :mod:`lowrank_kv.hf.compiled_ops`; what else both do is left out of its graphs.

Shapes: B batch, H query heads, G KV heads, Q queries, T keys, D head dim.
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lowrank_kv.hf.backends import Backend, backend, check_backend, default_backend
from lowrank_kv.hf.compiled_ops import GraphHandle, attend_in_graph, is_number
from lowrank_kv.hf.geometry import attention_modules, geometry_of
from lowrank_kv.hf.rope import Rope
from lowrank_kv.hf.rotary import rotary_function
from lowrank_kv.hf.unsupported_generation import allow_other_caches, refuse_other_caches
from lowrank_kv.utils.errors import UserError

ATTENTION_NAME = "lowrank_kv"
CONTEXT = "lowrank_kv"  # attribute of an attention module that holds its AttentionContext
TRANSFORM = "kv_compressor"  # submodule of an attention module that compresses k and v where there is no cache

Observer = Callable[[Tensor, Tensor, Tensor, "Rope | None"], None]


class CacheLayer(Protocol):
    """What the hook and the attention function ask of a compressed cache layer."""

    number: Tensor
    is_initialized: bool

    def arm(self, rope: Rope | None) -> None:
        """Take the rotation of the tokens about to be cached."""

    def arm_in_graph(self, *call: Tensor | None) -> None:
        """Leave the tokens about to be cached to an operation of a graph."""

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Cache new tokens."""

    def attend(self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any) -> tuple:
        """Attention over everything cached."""


@dataclasses.dataclass
class AttentionContext(GraphHandle):
    """What an attention module needs besides its weights."""

    module: nn.Module
    is_compressible: bool  # whether a layer of a compressed cache may be this module's
    apply_rotary: Callable | None
    hook: RemovableHandle
    previous: str  # the model's attention before it was prepared, which still runs underneath
    observer: Observer | None = None  # sees (q, rotated k, v, rope) of every uncached call, for calibration

    def __post_init__(self) -> None:
        self.register()

    @property
    def is_bare(self) -> bool:
        """Whether nothing sees or changes keys and values where there is no compressed cache."""
        return self.observer is None and TRANSFORM not in self.module._modules

    def rope(self, embeddings: tuple[Tensor, Tensor] | None, position_BT: Tensor | None) -> Rope | None:
        """The rotation of a call's tokens; None for a family that has none."""
        if embeddings is None or self.apply_rotary is None:
            return None
        return Rope(self.apply_rotary, *embeddings, position_BT=position_BT)

    def cache(
        self,
        layer: CacheLayer,
        key: Tensor,
        value: Tensor,
        embeddings: tuple[Tensor, Tensor] | None,
        position_BT: Tensor | None,
        mask: Tensor | None,
    ) -> None:
        """See :func:`lowrank_kv.hf.compiled_ops.cache_in_graph`."""
        _boolean(mask)  # what is refused leaves the cache as it was
        layer.arm(self.rope(embeddings, position_BT))
        layer.update(key, value)

    def attend(self, layer: CacheLayer, query: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, None]:
        """Attention over all that a cache layer holds."""
        return layer.attend(self.module, query, _boolean(mask), backend(self.previous), **kwargs)


class _Call(threading.local):
    """What an attention module's running call needs besides q, k and v; each thread has its own."""

    module: nn.Module | None = None
    rope: Rope | None = None
    layer: CacheLayer | None = None

    def begin(self, module: nn.Module, layer: CacheLayer | None, rope: Rope | None) -> None:
        self.module, self.layer, self.rope = module, layer, rope

    def take(self, module: nn.Module) -> tuple[CacheLayer | None, Rope | None]:
        """The cache layer and the rotation of this module's call, which are kept no longer; a call that fails before this
        leaves them until the thread's next."""
        layer, rope = (self.layer, self.rope) if module is self.module else (None, None)
        self.module = self.layer = self.rope = None
        return layer, rope


_call = _Call()


def has_compressors(model: PreTrainedModel) -> bool:
    """Whether some attention module of the model compresses its keys and values where there is no cache."""
    return any(TRANSFORM in module._modules for module in attention_modules(model).values())


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Make every attention module of `model` able to run compressed; without a compressed cache nothing changes.

    Safe to call again. Switches the model to the ``lowrank_kv`` attention, which runs the model's own (sdpa, eager or
    flash_attention_2) underneath; :func:`restore` switches it back.

    Raises:
        UserError: the model's attention is another, or cannot be replaced.
    """
    previous = model.config._attn_implementation
    if previous != ATTENTION_NAME:
        check_backend(previous)
    compressible = geometry_of(model).layers
    for index, module in attention_modules(model).items():
        if CONTEXT not in module.__dict__:
            hook = module.register_forward_pre_hook(_arm, with_kwargs=True)
            # A model loaded from a full checkpoint never had another.
            underneath = default_backend(model) if previous == ATTENTION_NAME else previous
            rotary = rotary_function(module)
            setattr(module, CONTEXT, AttentionContext(module, index in compressible, rotary, hook, underneath))
        else:
            _check_not_switched(module)
    if previous != ATTENTION_NAME:
        model.set_attn_implementation(ATTENTION_NAME)
        if model.config._attn_implementation != ATTENTION_NAME:
            raise UserError(
                f"{type(model).__name__} does not let its attention be replaced; this family is not supported"
            )
    refuse_other_caches(model)
    return model


def restore(model: PreTrainedModel) -> None:
    """Undo :func:`prepare`; a no-op on a model that was never prepared."""
    previous = None
    allow_other_caches(model)
    for module in attention_modules(model).values():
        context: AttentionContext | None = module.__dict__.pop(CONTEXT, None)
        if context is not None:
            context.hook.remove()
            previous = context.previous
    if previous is not None:
        model.set_attn_implementation(previous)


def _arm(module: nn.Module, args: tuple, kwargs: dict) -> None:
    _check_not_switched(module)
    context: AttentionContext = getattr(module, CONTEXT)
    if not context.is_compressible:
        return
    filled = _filled_layer(module, kwargs)
    layer = filled if hasattr(filled, "arm") else None
    states = args[0] if args else kwargs.get("hidden_states")
    # A prompt's attention may take anything, and to break off for it costs little.
    is_decoded = filled is not None and filled.is_initialized and states.shape[1] == 1
    in_graph = torch.compiler.is_compiling() and is_decoded
    if in_graph and layer is not None:
        cos, sin = kwargs.get("position_embeddings") or (None, None)
        layer.arm_in_graph(context.number, cos, sin, kwargs.get("position_ids"), kwargs.get("attention_mask"))
    elif not (in_graph and context.is_bare):
        _arm_outside(module, layer, kwargs)


def _filled_layer(module: nn.Module, kwargs: dict) -> Any:
    """The layer, of whatever cache, that a module's call fills; None where there is none yet."""
    cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
    # A DynamicCache made without a config has no layers before their first tokens come.
    layers = [] if cache is None else cache.layers
    return layers[module.layer_idx] if module.layer_idx < len(layers) else None


@torch.compiler.disable
def _arm_outside(module: nn.Module, layer: CacheLayer | None, kwargs: dict) -> None:
    context: AttentionContext = getattr(module, CONTEXT)
    rope = context.rope(kwargs.get("position_embeddings"), kwargs.get("position_ids"))
    if layer is not None:
        _boolean(kwargs.get("attention_mask"))  # what is refused leaves the cache as it was
        layer.arm(rope)
    _call.begin(module, layer, rope)


def _check_not_switched(module: nn.Module) -> None:
    if module.config._attn_implementation != ATTENTION_NAME:
        raise UserError(
            f"the model's attention was switched to `{module.config._attn_implementation}` after it was prepared for "
            f"compression, which would bypass it; call model.set_attn_implementation('{ATTENTION_NAME}')"
        )


def lowrank_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The registered attention function: (B, H, Q, D) queries → ((B, Q, H, D), None).

    With a compressed cache layer it attends over what the layer holds. Without one it lets the module's compressor, if
    there is one, replace key and value, and runs the model's own attention: this is the path of training and of
    uncached evaluation.
    """
    context: AttentionContext | None = getattr(module, CONTEXT, None)
    if context is None:
        raise UserError(
            f"attention `{ATTENTION_NAME}` needs a prepared model; call lowrank_kv.hf.attention.prepare(model)"
        )
    if is_number(key):
        softcap = kwargs.get("softcap")
        return attend_in_graph(key, context.number, query, attention_mask, kwargs["scaling"], softcap), None
    # In a graph a decoded token's keys are more than itself where another cache has them.
    is_another = torch.compiler.is_compiling() and context.is_bare and key.shape[2] > query.shape[2] == 1
    if is_another or not context.is_compressible:
        return backend(context.previous)(module, query, key, value, attention_mask, **kwargs)
    return _attend_outside(context, query, key, value, attention_mask, **kwargs)


@torch.compiler.disable
def _attend_outside(
    context: AttentionContext, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    layer, rope = _call.take(context.module)
    if layer is not None:
        return context.attend(layer, query, mask, **kwargs)
    if context.observer is not None:
        context.observer(query, key, value, rope)
    transform = context.module._modules.get(TRANSFORM)
    if transform is not None:
        key, value = transform(key, value, rope)
    return backend(context.previous)(context.module, query, key, value, mask, **kwargs)


def _boolean(mask: Tensor | None) -> Tensor | None:
    """A mask as :class:`Backend` takes it. transformers passes a user's own four-dimensional one through as it is.

    Raises:
        UserError: it adds something to scores, where a compressed cache can only hide tokens.
    """
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
