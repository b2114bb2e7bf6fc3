"""What a call of an attention module may ask for when its keys and values are in a compressed cache.

The compressed form computes softmax(q Kᵀ · scaling) V over all tokens of the cache, with a cap on scores and sinks where the
model has them. A family that does something else beside it passes a keyword that says so, or gives its attention other keys
and values than it stored. Both are refused: to leave them out would answer wrongly without a word.

Shapes: B batch, G KV heads, Q new tokens, D head dim.
"""

from typing import Any

from torch import Tensor, nn

from lowrank_kv.hf.geometry import KVGeometry, window_is_idle
from lowrank_kv.utils.errors import UserError

# What transformers passes to every attention function and what changes none of its numbers, or what masks and rotations
# have taken in already.
_WITHOUT_EFFECT = {
    "cache_position",
    "dropout",  # of training, which has no cache
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "tokenizer",  # by which `generate()` finds stop strings
    "use_cache",
}
_HONOURED = {"scaling", "softcap", "s_aux"}
_PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
_ASKED_FOR = _PACKED | {"output_attentions"}


def refuse(objection: str | None) -> None:
    """Raise :class:`UserError` with an objection, if there is one.

    A graph cannot raise an error of ours while it is made: it takes the objection along, and its operations call this.
    """
    if objection is not None:
        raise UserError(objection)


def objection_to_call(module: nn.Module, kwargs: dict[str, Any]) -> str | None:
    """Why a user's call is refused before anything is stored; None where it is not. What a family adds by itself is found by
    :func:`objection_to_keywords`."""
    return objection_to_keywords(module, {name: value for name, value in kwargs.items() if name in _ASKED_FOR})


def objection_to_keywords(module: nn.Module, kwargs: dict[str, Any]) -> str | None:
    """Why a call is refused that asks for more than the compressed attention computes; None where it does not."""
    for name, value in kwargs.items():
        if name in _HONOURED or name in _WITHOUT_EFFECT or value is None:
            continue
        if name == "output_attentions":
            if not value:
                continue
            return (
                "`output_attentions=True` asks for the weights of all tokens, which attention in the compressed form does "
                "not compute; leave it out, or pass `use_cache=False` to a model without a compressor"
            )
        if name == "is_causal" and value is True:
            continue
        if name == "sliding_window" and window_is_idle(module.config, value):  # the mask has it all the same
            continue
        if name in _PACKED:
            return (
                f"`{name}` packs several texts into one sequence, and a compressed cache holds one text in each; pass a "
                f"left-padded batch"
            )
        return (
            f"{type(module).__name__} passes `{name}` to its attention, which the compressed attention does not know and "
            f"would leave out; leave it out of the call if it is named there, else this family, or this setting of it, "
            f"cannot run with a compressed cache"
        )
    return None


class StoredStates:
    """Keys and values that a call stored, until its attention has run: it must attend to these very tensors.

    A module that rearranges them, extends them, attends twice, or attends to those of another layer is found out here.

    Attributes:
        states: exact keys (rotated) and values, (B, G, Q, D) each; None between calls.
    """

    def __init__(self):
        self.states: tuple[Tensor, Tensor] | None = None

    def put(self, key_BGQD: Tensor, value_BGQD: Tensor) -> None:
        self.states = key_BGQD, value_BGQD

    def drop(self) -> None:
        """Hold nothing: the attention has run, or the call ended before it."""
        self.states = None

    def take(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        """Raise :class:`UserError` unless the attention of `module` is given what it has just stored."""
        if self.states is None:
            raise UserError(
                f"{type(module).__name__} attends to keys and values that it did not store in this call (it attends twice, "
                f"or to another layer's), which a compressed cache cannot give it; use a model of another family"
            )
        if self.states[0] is not key or self.states[1] is not value:
            raise UserError(
                f"{type(module).__name__} changes keys or values between its cache and its attention, so that the cache "
                f"does not hold what is attended to; this family cannot run with a compressed cache"
            )


def check_shape(key_BGQD: Tensor, value_BGQD: Tensor, geometry: KVGeometry) -> None:
    """Raise :class:`UserError` unless keys and values are of G heads of D dims, as the model's configuration says."""
    groups, head_dim = geometry.num_kv_heads, geometry.head_dim
    of_keys, of_values = key_BGQD.shape, value_BGQD.shape
    if of_keys[1] == of_values[1] == groups and of_keys[3] == of_values[3] == head_dim:
        return
    for what, states in (("keys", key_BGQD), ("values", value_BGQD)):
        if (states.shape[1], states.shape[3]) != (groups, head_dim):
            raise UserError(
                f"a layer stores {what} of {states.shape[1]} heads × {states.shape[3]} dims, and a compressed cache of this "
                f"model takes keys and values of {groups} heads × {head_dim} dims; this family cannot run with one"
            )
