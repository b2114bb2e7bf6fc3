"""What every compressed cache layer shares: how the model reaches it, and what `generate()` does to it.

Shapes: B batch, H query heads, G KV heads, D head dim, C = G·D, Q new tokens, T cached tokens.
"""

import abc
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from lowrank_kv.hf.backends import Backend
from lowrank_kv.hf.compiled_ops import GraphHandle, cache_in_graph
from lowrank_kv.hf.rope import Rope, RopeHistory
from lowrank_kv.utils.errors import UserError

# Up to this many new tokens (a drafted continuation) are attended without rebuilding the cache.
MAX_DECODE_QUERIES = 16


def join_heads(states_BGTD: Tensor) -> Tensor:
    """(B, G, T, D) → (B, T, C)."""
    return states_BGTD.transpose(1, 2).flatten(2)


def split_heads(states_BTC: Tensor, head_dim: int) -> Tensor:
    """(B, T, C) → (B, G, T, D)."""
    return states_BTC.unflatten(2, (-1, head_dim)).transpose(1, 2)


class CompressedLayer(GraphHandle, CacheLayerMixin, abc.ABC):
    """One layer of a compressed cache.

    transformers calls :meth:`update` and then the attention function, which calls :meth:`attend`; what `update` returns
    is only the new tokens, so a model that does not run the compressed attention is refused.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self):
        super().__init__()
        self.register()
        self.history: RopeHistory | None = None
        self._releases_history = False
        self._rope: Rope | None = None
        self._armed = False
        self._graph_call: tuple[Tensor | None, ...] | None = None

    def bind(self, history: RopeHistory | None, *, is_last: bool) -> None:
        """Take the cache's record of rotations; the last layer of a step drops its table of cos and sin."""
        self.history, self._releases_history = history, is_last

    @property
    @abc.abstractmethod
    def rotates(self) -> bool:
        """Whether keys are stored before rotation and the rotation of each token must be remembered."""

    @abc.abstractmethod
    def start(self) -> None:
        """Make an empty state, now that :attr:`dtype`, :attr:`device`, :attr:`batch_size` and :attr:`head_dim` are known."""

    @abc.abstractmethod
    def take(self, key_BGQD: Tensor, value_BGQD: Tensor, rope: Rope | None) -> None:
        """New tokens: rotated keys, values and, where the family has one, the rotation of these keys."""

    @abc.abstractmethod
    def attend_cached(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attention of (B, H, Q, D) queries over all tokens, the newest included → ((B, Q, H, D), None)."""

    @abc.abstractmethod
    def get_seq_length(self) -> int:
        """Tokens seen."""

    @abc.abstractmethod
    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of every sequence."""

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
        """(kind, tensor) of all state held between steps, each byte once; kinds as in `stores.memory_report`."""

    def expect_prompt(self, length: int) -> None:
        """A `generate()` begins, whose prompt ends at place `length`; most layers treat all tokens alike."""

    # -- what the attention function calls ------------------------------------------------------------------------

    def arm(self, rope: Rope | None) -> None:
        self._rope, self._armed, self._graph_call = rope, True, None

    def arm_in_graph(self, *call: Tensor | None) -> None:
        """For a call whose tokens an operation of a graph is to cache; `call` is what it takes besides these."""
        self._graph_call = call

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.head_dim = key_states.shape[0], key_states.shape[3]
        self.start()
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take rotated keys (B, G, Q, D) and values; returns them unchanged, for the attention function to ignore, or, in
        a graph, this layer's number in the keys' place."""
        if self._graph_call is not None:
            (context, *call), self._graph_call = self._graph_call, None
            return cache_in_graph(self.number, context, key_states, value_states, *call), value_states
        # Marked so only where it matters: the mark costs every call of an uncompiled model, too.
        update = self._update_outside if torch.compiler.is_compiling() else self._update
        update(key_states, value_states)
        return key_states, value_states

    @torch.compiler.disable
    def _update_outside(self, key_states: Tensor, value_states: Tensor) -> None:
        self._update(key_states, value_states)

    def _update(self, key_states: Tensor, value_states: Tensor) -> None:
        if not self._armed:
            raise UserError(
                "a compressed cache was given to a model that is not prepared for it; make the cache with "
                "`from_model(model)` or attach the compressor to this very model first"
            )
        rope, self._rope, self._armed = self._rope, None, False
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch_size:
            raise UserError(
                f"the cache holds {self.batch_size} sequences, but {key_states.shape[0]} were passed; start a fresh cache"
            )
        if self.rotates and rope is not None:
            rope = self.history.extend(rope, self.get_seq_length() + key_states.shape[2])
        self.take(key_states, value_states, rope)

    def attend(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """See :meth:`attend_cached`."""
        output = self.attend_cached(module, query, mask, inner, **kwargs)
        if self._releases_history and self.history is not None:
            self.history.release()
        return output

    # -- what generate() does to a cache --------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens (the argument is zero or negative, as in `DynamicLayer`)."""
        # Up to 5.17 drafting passes a tensor, which would become the length of every sequence at once.
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove and self.is_initialized:
            length = self.get_seq_length() + tokens_to_remove
            self.check_crop(length)
            self.truncate(length)

    def check_crop(self, length: int) -> None:
        """Raise :class:`UserError` where the first `length` tokens cannot be kept alone."""
        held = self.get_seq_length()
        if not 0 <= length <= held:
            raise UserError(
                f"`tokens_to_remove` is {length - held}, but the cache holds {held} tokens: it must be between −{held} and "
                f"0, and −5 forgets the last five"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._select([b for b in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        # A boolean index keeps its True places, as with tensors.
        rows = torch.nonzero(indices).flatten() if indices.dtype == torch.bool else indices
        self._select(rows.tolist())

    def reset(self) -> None:
        self.clear()
        self.is_initialized = False

    def offload(self) -> None:
        raise UserError("a compressed cache cannot be offloaded; leave `cache_implementation` unset")

    def _select(self, rows: list[int]) -> None:
        if self.is_initialized:
            self.select(rows)
            self.batch_size = len(rows)

    def __deepcopy__(self, memo: dict) -> "CompressedLayer":
        # Codecs and calibrated bases belong to the model, not to the tokens: they are shared.
        twin = copy.copy(self)
        twin.history = copy.deepcopy(self.history, memo)
        memo[id(self)] = twin
        if self.is_initialized:
            twin.copy_state(memo)
        return twin
