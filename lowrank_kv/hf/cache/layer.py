"""The base of every compressed cache layer: the steps of a call, and the operations of `generate()` on a cache.

Shapes: B batch, H query heads, G KV heads, D head dim, C = G·D, Q new tokens, T cached tokens.
"""

import abc
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from lowrank_kv.hf.backends import Backend
from lowrank_kv.hf.cache_argument import CACHE
from lowrank_kv.hf.call_checks import StoredStates, check_shape
from lowrank_kv.hf.compiled_ops import GraphHandle, outside_graphs
from lowrank_kv.hf.geometry import KVGeometry
from lowrank_kv.hf.rope import Rope, RopeHistory
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.values import whole_number

# Up to this many new tokens (a drafted continuation) are attended without rebuilding the cache.
MAX_DECODE_QUERIES = 16


def join_heads(states_BGTD: Tensor) -> Tensor:
    """(B, G, T, D) → (B, T, C)."""
    return states_BGTD.transpose(1, 2).flatten(2)


def split_heads(states_BTC: Tensor, head_dim: int) -> Tensor:
    """(B, T, C) → (B, G, T, D)."""
    return states_BTC.unflatten(2, (-1, head_dim)).transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class CallContext:
    """What a layer needs to know of one call besides its queries, keys and values.

    Attributes:
        rope: the rotation of the call's tokens; None for a family that has none.
        mask: boolean (B or 1, 1, Q, T), True where a query may see a token; None where only causality masks.
    """

    rope: Rope | None
    mask: Tensor | None


class CompressedLayer(GraphHandle, CacheLayerMixin, abc.ABC):
    """One layer of a compressed cache.

    A call of an attention module takes three steps. Before it, the module's hook calls :meth:`begin_call`. The module gives
    its new tokens to transformers' :meth:`update`, which calls :meth:`append`. The attention function calls :meth:`attend`,
    which calls :meth:`attend_cached`. A method implements `append` and `attend_cached`.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    reads_prompts_exactly = True  # whether a prompt's tokens attend to one another's states before they are compressed
    saved: tuple[str, ...] | None = None  # attributes that hold the tokens, for a file; None where no file takes them
    shared: tuple[str, ...] = ()  # attributes that all caches of a configuration hold together
    _owner: int | None = None  # whose states are stored here; None once a cache was saved and loaded

    def __init__(self):
        super().__init__()
        self.history: RopeHistory | None = None
        self._released: RopeHistory | None = None  # at the end of a call
        self._pending_call: CallContext | None = None  # between begin_call and update
        self.stored = StoredStates()  # from update to the end of attend
        self._geometry: KVGeometry | None = None  # of the cache

    def bind(
        self, owner: int, geometry: KVGeometry, history: RopeHistory | None, *, released: RopeHistory | None = None
    ) -> None:
        """Become a cache's layer of a model.

        Args:
            owner: identity of the prepared model; a copy of the model has the same.
            geometry: of the cache.
            history: the cache's record of rotations; None for a layer that does not rotate keys, or compresses them rotated.
            released: the record whose tables of cos and sin are dropped at the end of a call; the last layer's.
        """
        self._owner, self._geometry = owner, geometry
        self.history, self._released = history, released

    @property
    @abc.abstractmethod
    def rotates(self) -> bool:
        """Whether keys are stored before rotation and the rotation of each token must be remembered."""

    @abc.abstractmethod
    def start(self) -> None:
        """Make an empty state, now that :attr:`dtype`, :attr:`device`, :attr:`batch_size` and :attr:`head_dim` are known."""

    @abc.abstractmethod
    def append(self, key_BGQD: Tensor, value_BGQD: Tensor, context: CallContext) -> None:
        """Store a call's new tokens: rotated keys and values. Where this raises, :meth:`update` truncates the layer."""

    @abc.abstractmethod
    def attend_cached(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attention of a call's (B, H, Q, D) queries over all tokens, the appended ones included → ((B, Q, H, D), None).

        Args:
            module: the attention module.
            mask: as in :class:`CallContext`.
            inner: the model's own attention, for exact or rebuilt keys and values.
            kwargs: `scaling`, `softcap` and what else the module passes to its attention.
        """

    @abc.abstractmethod
    def get_seq_length(self) -> int:
        """Tokens seen."""

    @abc.abstractmethod
    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of every sequence, and nothing of tokens that a call which was cut short has stored
        in part."""

    @abc.abstractmethod
    def select(self, rows: list[int]) -> None:
        """Keep the sequences at `rows`, in that order, repeats allowed."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Forget all tokens; :meth:`start` is called before the next."""

    @abc.abstractmethod
    def copy_state(self, memo: dict) -> None:
        """Take copies of the state, which is still shared with the layer this one was copied from; `memo` as in
        :func:`copy.deepcopy`, for what layers share."""

    @abc.abstractmethod
    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of all state kept between steps, each byte once; kinds as in `stores.memory_report`."""

    def shared_by_sequences(self) -> list[Any]:
        """What the tokens' state refers to and all caches of a configuration share, of a layer that has started."""
        return []

    def expect_prompt(self, length: int) -> None:
        """Called when a `generate()` begins whose prompt ends at position `length`; most layers treat all tokens alike."""

    # -- one call ---------------------------------------------------------------------------------------------------

    def check_owner(self, identity: int) -> None:
        """Raise :class:`UserError` where the keys and values of another model are stored here."""
        if self._owner not in (None, identity):
            raise UserError(
                f"`{CACHE}` is a cache of another model, or of this one before it was detached, and holds keys and "
                "values by the bases of that; make a cache of this model with `from_model(model)`"
            )

    def begin_call(self, context: CallContext) -> None:
        """The next :meth:`update` appends the tokens of this call."""
        self._pending_call = context
        self.stored.drop()  # of a call that was cut short before its attention

    @outside_graphs
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append rotated keys (B, G, Q, D) and values. Returns them unchanged; the attention function ignores them.

        Raises:
            UserError: no call was begun, as by a model that is not prepared, or it has another number of sequences.
        """
        context, self._pending_call = self._pending_call, None
        if context is None:
            raise UserError(
                "a compressed cache was given to a model that is not compressed; call `lowrank_kv.compress(model, …)` as "
                "when it was filled, or make a cache with `from_model(model)`"
            )
        if self._geometry is not None:
            check_shape(key_states, value_states, self._geometry)
        past = self.get_seq_length()
        if not past:  # also where a call was refused, or all was cropped: the next may have other sequences
            self.lazy_initialization(key_states, value_states)
        self._check_batch(key_states.shape[0])
        if context.rope is not None and self.history is None and self.rotates:
            raise UserError(
                "the model rotates keys by a module that was not found, so that a compressed cache could not rotate them "
                "again; use a model of another family"
            )
        try:
            if self.history is not None and context.rope is not None:
                context = CallContext(self.history.extend(context.rope, past + key_states.shape[2]), context.mask)
            self.append(key_states, value_states, context)
        except BaseException:  # an interrupt, too
            if self.history is not None:
                self.history.crop(past)  # else the next call's tokens would get the rotations of these
            self.truncate(past)  # else keys would be paired with values of other tokens
            raise
        self.stored.put(key_states, value_states)
        return key_states, value_states

    def _check_batch(self, passed: int) -> None:
        held = self.batch_size
        if passed != held:
            remedy = "start a fresh cache"
            if passed % held == 0:
                repeat = f"`cache.batch_repeat_interleave({passed // held})`"
                remedy = f"call {repeat} first, where beams or `num_return_sequences` follow a prefix, or {remedy}"
            raise UserError(f"the cache holds {held} sequences, but {passed} were passed; {remedy}")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.head_dim = key_states.shape[0], key_states.shape[3]
        self.start()
        self.is_initialized = True

    def attend(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """See :meth:`attend_cached`, for which :attr:`stored` holds the exact states of the call."""
        try:
            output = self.attend_cached(module, query, mask, inner, **kwargs)
        finally:
            self.stored.drop()
        if self._released is not None:
            self._released.release()
        return output

    # -- what generate() does to a cache --------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens (the argument is zero or negative, as in `DynamicLayer`)."""
        # Up to 5.17 drafting passes a tensor, which would become the length of every sequence at once.
        tokens_to_remove = whole_number("tokens_to_remove", tokens_to_remove)
        if tokens_to_remove and self.is_initialized:
            length = self.get_seq_length() + tokens_to_remove
            self.check_crop(length)
            self.truncate(length)

    def check_crop(self, length: int) -> None:
        """Raise :class:`UserError` where the tokens after the first `length` cannot be forgotten."""
        tokens = self.get_seq_length()
        if not 0 <= length <= tokens:
            raise UserError(
                f"`tokens_to_remove` is {length - tokens}, but the cache holds {tokens} tokens: it must be between "
                f"−{tokens} and 0, and −5 forgets the last five"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._select([b for b in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(self.sequences_at(indices))

    def sequences_at(self, indices: Tensor) -> list[int]:
        """The sequences that an index names: as with tensors, a boolean one keeps its True places, and a negative number
        counts from the end.

        Raises:
            UserError: the cache has no such sequences.
        """
        is_boolean, batch = indices.dtype == torch.bool, self.batch_size if self.is_initialized else 0
        if batch and is_boolean and indices.shape != (batch,):
            raise UserError(
                f"`indices` is {indices.tolist()}, but the cache holds {batch} sequences: a boolean index says of each "
                f"whether it stays, so give one of length {batch}, or the numbers of those that stay"
            )
        rows = torch.nonzero(indices).flatten() if is_boolean else indices
        if indices.dim() != 1 or indices.is_floating_point() or not len(rows):
            raise UserError(
                f"`indices` is {indices.tolist()}: give a list of whole numbers, or a boolean of each; one must stay"
            )
        if batch and not bool(((-batch <= rows) & (rows < batch)).all()):
            raise UserError(f"`indices` is {rows.tolist()}, but the cache holds {batch} sequences: they count from 0")
        return [row + batch if row < 0 else row for row in rows.tolist()]

    def reset(self) -> None:
        self.clear()
        self._pending_call = None
        self.stored.drop()
        self.is_initialized = False
        self.__dict__.pop("batch_size", None)  # transformers asks layers for it that have one

    def offload(self) -> None:
        raise UserError("a compressed cache cannot be offloaded; leave `cache_implementation` unset")

    def _select(self, rows: list[int]) -> None:
        if self.is_initialized:
            self.select(rows)
            self.batch_size = len(rows)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_owner"}

    def __deepcopy__(self, memo: dict) -> "CompressedLayer":
        # Codecs and calibrated bases belong to the model, not to the tokens: they are shared.
        twin = copy.copy(self)
        twin._owner = self._owner  # which a saved cache does not keep
        twin.stored = StoredStates()
        twin.history, twin._released = copy.deepcopy((self.history, self._released), memo)
        memo[id(self)] = twin
        if self.is_initialized:
            twin.copy_state(memo)
        return twin
