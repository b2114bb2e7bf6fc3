"""A cache layer that keeps a window of tokens at full rank, and the others as coefficients.

Shapes: B batch, H query heads, G KV heads, D head dim, Q new tokens, T cached tokens.
"""

import copy
import functools
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowrank_kv.hf.backends import Backend
from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES, CallContext
from lowrank_kv.hf.cache.per_sequence_layer import SequenceLayer, mask_of_sequence, new_present
from lowrank_kv.hf.cache.windowed.adaptive_store import AdaptiveStore
from lowrank_kv.hf.cache.windowed.config import WindowedConfig
from lowrank_kv.hf.cache.windowed.plan import InitialBasis, Plan, eviction_parts
from lowrank_kv.hf.cache.windowed.prompts import CommittedPromptTracker
from lowrank_kv.hf.cache.windowed.row_group import RowGroup
from lowrank_kv.hf.cache.windowed.rows import JointRows, SeparateRows
from lowrank_kv.hf.cache.windowed.sequence import CompressionContext, WindowedSequence, columns_of, mask_at
from lowrank_kv.hf.cache.windowed.store import TokenStore
from lowrank_kv.ops.gradients import without_gradients
from lowrank_kv.ops.lowrank_attention import LowRankTokens, lowrank_attention
from lowrank_kv.ops.rotation import Rotate, Rotation
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.softmax import join_sequences
from lowrank_kv.utils.errors import UserError

Side = Literal["key", "value"]


class WindowedLayer(SequenceLayer):
    """One layer of sequences that each keep a window at full rank and the other tokens as coefficients.

    Attributes:
        attends: the operation that a few queries attend by.
    """

    attends = staticmethod(lowrank_attention)
    shared = ("plan",)

    def __init__(self, plan: Plan, index: int):
        super().__init__()
        self.plan, self.config, self.index = plan, plan.config, index
        self.schedule = plan.schedule(index)
        self.prompts = CommittedPromptTracker(plan.config)
        self.row_group = RowGroup([self])
        self._ends_with_queries = plan.config.chooses_by_last_queries  # asked at every token, and worked out here

    @property
    def reads_prompts_exactly(self) -> bool:
        return self.config.reads_prompts_exactly

    @functools.cached_property
    def rotates(self) -> bool:
        return self.config.rotates

    @property
    def is_croppable(self) -> bool:
        return not self.config.eviction.is_on

    def activate_past_recording(self) -> None:
        """See :meth:`SequenceLayer.activate_past_recording`.

        Raises:
            UserError: tokens are evicted, and an eviction cannot be undone.
        """
        if self.config.eviction.is_on:
            raise UserError(
                f"`eviction.keep_ratio` is {self.config.eviction.keep_ratio}, but a call with drafts must be able "
                f"to take tokens back; keep the whole prompt (`eviction.keep_ratio: 1`), or generate without drafts"
            )
        super().activate_past_recording()

    def start(self) -> None:
        self.row_group.check_device(self)
        super().start()

    def shared_by_sequences(self) -> list[Any]:
        pair = self.plan.pair(self.index, self.device)
        return [self.config, self.schedule, *pair, *(initial.coef_scale for initial in pair)]

    def new_sequence(self) -> WindowedSequence:
        key, value = self.plan.pair(self.index, self.device)
        stores = self.new_store(key, "key"), self.new_store(value, "value")
        rows = JointRows(*stores, holds=key.holds_rows) if self._shares_rows else SeparateRows(*stores)
        return WindowedSequence(rows, self.schedule)

    @property
    def _shares_rows(self) -> bool:
        """Whether values, and perhaps other layers, are in the rows of keys."""
        return not self.plan.layers[self.index][1].holds_rows

    def new_store(self, initial: InitialBasis, side: Side) -> TokenStore:
        """An empty store of one sequence's keys, or values."""
        return fixed_store(initial, self.config, **self.store_settings(side))

    def store_settings(self, side: Side) -> dict[str, Any]:
        """What every store of this layer is made with; see :class:`TokenStore`."""
        return {"head_dim": self.head_dim, "dtype": self.dtype, "name": f"layer {self.index} {side}s"}

    def append(self, key_BGQD: Tensor, value_BGQD: Tensor, context: CallContext) -> None:
        """Store new tokens at full rank; :meth:`attend_cached` compresses those whose time has come."""
        if self._ends_with_queries:
            self.check_not_padded_right(context.mask)
        new = slice(self.get_seq_length(), self.get_seq_length() + key_BGQD.shape[2])
        present_BQ = [
            new_present(context.mask, b, new, each.positions.padding) for b, each in enumerate(self.sequences)
        ]
        for b, sequence in enumerate(self.sequences):
            sequence.append(key_BGQD[b], value_BGQD[b], present_BQ[b])

    def attend_cached(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """A prompt, and long chunks after it, run `inner` on exact or rebuilt states. A few queries attend in the low-rank
        space, unless the configuration asks for rebuilt states there, too."""
        key, value = self.stored.states
        past, scaling, new_key = self.get_seq_length() - query.shape[2], kwargs["scaling"], key
        is_few = query.shape[2] <= MAX_DECODE_QUERIES
        is_exact = self.reads_prompts_exactly
        if self._shares_rows:
            self.row_group.find_rows(self)
        if not is_exact:
            self._compress_due(query, scaling)
        if past and is_few and self.config.attention == "low_rank":
            output = self._attend_low_rank(query, mask, inner.scoring(kwargs)), None
        elif any(sequence.min_crop_length for sequence in self.sequences):
            output = self._attend_rebuilt(module, query, mask, inner, **kwargs), None
        elif past or not is_exact:
            output = without_gradients(inner(module, query, *self.dense(), mask, **kwargs)[0], query), None
        else:
            output = inner(module, query, key, value, mask, **kwargs)
        if is_exact:
            self._compress_due(query, scaling)
        if self.config.eviction.is_on:
            parts = eviction_parts(self.plan.layers[self.index])
            keys = functools.partial(self._prompt_keys, new_key)
            self.evict(query, mask, scaling, self.config.eviction, keys, parts=parts)
        return output

    def _prompt_keys(self, new_key: Tensor, b: int, prompt: slice) -> Tensor:
        """Rotated keys of a sequence's prompt, (G, T, D): exact ones if this call brought it alone, else rebuilt."""
        end = self.get_seq_length()
        is_of_this_call = prompt == slice(end - new_key.shape[2], end)
        return new_key[b] if is_of_this_call else self.sequences[b].keys_at(prompt, self._rotation(b))

    def _attend_rebuilt(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> Tensor:
        """`inner` on the tokens that each sequence still has, which may be of different number."""
        outputs = []
        for b, sequence in enumerate(self.sequences):
            key, value, position = sequence.in_order(self._rotation(b))
            mask_1HQT = mask_at(mask, b, position, query.shape[1])
            outputs.append(inner(module, query[b : b + 1], key[None], value[None], mask_1HQT, **kwargs)[0])
        return without_gradients(torch.cat(outputs), query)

    def _compress_due(self, query: Tensor, scaling: float) -> None:
        if not self.row_group.compresses_in(self):
            return
        prompt, is_uncommitted = self.prompts.committed(query, self.get_seq_length())
        if self.prompts.uncommitted is not None:
            return  # all tokens wait until the next call
        for b, sequence in enumerate(self.sequences):
            of_sequence = None if prompt is None else prompt.of_sequence(b)
            steps = sequence.steps_due(of_sequence, is_uncommitted=is_uncommitted)
            if steps and self._shares_rows:
                unrotates = [layer._unrotate(b) for layer in self.row_group.layers]
                for step in steps:
                    self.row_group.compress(b, step, unrotates)
            elif steps:
                context = CompressionContext(of_sequence, scaling, self._rotation(b), self._unrotate(b))
                for step in steps:
                    sequence.compress(step, context)

    def _attend_low_rank(self, query: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
        outputs = []
        for b, sequence in enumerate(self.sequences):
            mask_QT = None
            if mask is not None:
                mask_QT = columns_of(mask_of_sequence(mask, b), sequence.positions.stored(), query.shape[1])
            tokens = LowRankTokens(
                sequence.key.operands(),
                sequence.value.operands(),
                self._rotation(b),
                sequence.positions.low_rank_positions() if self.rotates else None,
                mask_QT,
            )
            outputs.append(self.attends(query[b], tokens, scoring))
        return join_sequences(outputs)

    def dense(self) -> tuple[Tensor, Tensor]:
        """All keys (rotated) and values, rebuilt, (B, G, T, D) each."""
        if self._shares_rows:
            self.row_group.find_rows(self)
        pairs = [sequence.dense(self._rotation(b)) for b, sequence in enumerate(self.sequences)]
        return torch.stack([key for key, _ in pairs]), torch.stack([value for _, value in pairs])

    def __deepcopy__(self, memo: dict) -> "WindowedLayer":
        twin = super().__deepcopy__(memo)
        twin.row_group = copy.deepcopy(self.row_group, memo)
        return twin

    def _rotation(self, b: int) -> Rotation | None:
        return None if self.history is None else self.history.rotation(b, self.device)

    def _unrotate(self, b: int) -> Rotate | None:
        return None if self.history is None else self.history.unrotation_of(b)


def fixed_store(
    initial: InitialBasis, config: WindowedConfig, *, head_dim: int, dtype: torch.dtype, name: str
) -> TokenStore:
    """An empty store of one sequence whose shared basis stays as it is; see :class:`TokenStore` for the arguments."""
    settings = {"head_dim": head_dim, "dtype": dtype, "name": name, "leaves_room": config.compresses_singly}
    if config.own_directions:
        least = config.own_directions_from
        return AdaptiveStore(initial, count=config.own_directions, least_tokens=least, **settings)
    return TokenStore(initial, **settings)


def layers_of(plan: Plan, kind: type[WindowedLayer]) -> dict[int, WindowedLayer]:
    """Layer index → the layer of a cache of this kind; those that share rows are of one group."""
    layers = {index: kind(plan, index) for index in plan.layers}
    for group in map(RowGroup, ([layers[index] for index in each] for each in plan.row_groups())):
        for layer in group.layers:
            layer.row_group = group
    return layers
