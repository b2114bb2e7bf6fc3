"""The OjaKV cache that stock `generate()` drives.

Shapes: B batch, H query heads, G KV heads, D head dim, Q new tokens, T cached tokens.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.backends import Backend
from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES, CallContext
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.per_sequence_layer import SequenceLayer, mask_of_row
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.ops.lowrank_attention import LowRankTokens, lowrank_attention
from lowrank_kv.ops.rotation import Rotate, Rotation
from lowrank_kv.ops.softmax import join_sequences
from lowrank_kv.utils.errors import UserError
from ojakv.basis_plan import Plan, eviction_parts, make_plan
from ojakv.config import OjaKVConfig
from ojakv.online_store import OnlineStore
from ojakv.prompts import OnlinePromptTracker
from ojakv.sequence import OnlineSequence, columns_of


class OjaKVLayer(SequenceLayer):
    """One layer whose bases follow each sequence (OjaKV, Algorithm 1)."""

    def __init__(self, plan: Plan, index: int):
        super().__init__()
        self.plan, self.config, self.index = plan, plan.config, index
        self.prompts = OnlinePromptTracker(plan.config)
        self._new: tuple[Tensor, Tensor] | None = None  # exact states of the running call, until they are attended

    @property
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

    def new_sequence(self) -> OnlineSequence:
        bases = self.plan.pair(self.index, self.device)
        return OnlineSequence(bases, self.config, head_dim=self.head_dim, dtype=self.dtype, layer=self.index)

    def append(self, key_BGQD: Tensor, value_BGQD: Tensor, context: CallContext) -> None:
        """Store new tokens at full rank; :meth:`attend_cached` compresses those whose time has come."""
        places = slice(self.get_seq_length(), self.get_seq_length() + key_BGQD.shape[2])
        for b, sequence in enumerate(self.sequences):
            present_Q = None if context.mask is None else _present(context.mask, b, places)
            sequence.append(key_BGQD[b], value_BGQD[b], present_Q)
        self._new = (key_BGQD, value_BGQD)

    def attend_cached(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """A prompt, and long chunks after it, run `inner` on exact or rebuilt states. A few queries attend in the low-rank
        space, unless the configuration asks for rebuilt states there, too."""
        (key, value), self._new = self._new, None
        past, scaling, new_key = self.get_seq_length() - query.shape[2], kwargs["scaling"], key
        is_few = query.shape[2] <= MAX_DECODE_QUERIES
        is_exact = self.config.prefill == "exact"
        if not is_exact:
            self._compress_due(query, scaling)
        if past and is_few and self.config.attention == "low_rank":
            output = self._attend_low_rank(query, mask, scaling, inner.softcap(kwargs)), None
        elif any(sequence.min_crop_length for sequence in self.sequences):
            output = self._attend_rebuilt(module, query, mask, inner, **kwargs), None
        else:
            if past or not is_exact:
                key, value = self.dense()
            output = inner(module, query, key, value, mask, **kwargs)
        if is_exact:
            self._compress_due(query, scaling)
        if self.config.eviction.is_on:
            self._evict(query, new_key, mask, scaling)
        return output

    def _evict(self, query: Tensor, new_key: Tensor, mask: Tensor | None, scaling: float) -> None:
        """Forget the tokens of a prompt, once it is complete, that its last tokens do not look at. Heads that share their
        coefficients choose together. They choose by the exact keys of a prompt that this call brought alone, by rebuilt keys
        where it took several calls."""
        eviction = self.config.eviction
        end = self.get_seq_length()
        completed = self.prompts.completed(query, end, eviction.window_size)
        if completed is None:
            return
        prompt, query_BHWD = completed
        is_of_this_call = prompt == slice(end - new_key.shape[2], end)
        parts = eviction_parts(self.plan.layers[self.index])
        for b, sequence in enumerate(self.sequences):
            key_GTD = new_key[b] if is_of_this_call else sequence.keys_at(prompt, self._rotation(b))
            present_T = None if mask is None else _present(mask, b, prompt)
            score_PT = eviction.scores(query_BHWD[b], key_GTD, scaling, present_T, parts=parts)
            sequence.evict(score_PT, prompt, eviction)

    def _attend_rebuilt(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> Tensor:
        """`inner` on the tokens that each sequence still has, which may be of different number."""
        outputs = []
        for b, sequence in enumerate(self.sequences):
            key, value, position = sequence.in_order(self._rotation(b))
            mask_1HQT = None
            if mask is not None:
                columns = columns_of(mask_of_row(mask, b), position, query.shape[1])
                mask_1HQT = columns[None] if columns.dim() == 3 else columns[None, None]
            outputs.append(inner(module, query[b : b + 1], key[None], value[None], mask_1HQT, **kwargs)[0])
        return torch.cat(outputs)

    def _compress_due(self, query: Tensor, scaling: float) -> None:
        prompt, is_uncommitted = self.prompts.committed(query, self.get_seq_length())
        if self.prompts.uncommitted is not None:
            return  # all tokens wait until the next call
        for b, sequence in enumerate(self.sequences):
            sequence.compress_due(
                None if prompt is None else prompt.of_sequence(b),
                scaling,
                self._rotation(b),
                self._unrotate(b),
                is_uncommitted=is_uncommitted,
            )

    def _attend_low_rank(self, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None) -> Tensor:
        outputs = []
        for b, sequence in enumerate(self.sequences):
            mask_QT = None
            if mask is not None:
                mask_QT = columns_of(mask_of_row(mask, b), sequence.positions.stored(), query.shape[1])
            tokens = LowRankTokens(
                sequence.key.operands(),
                sequence.value.operands(),
                self._rotation(b),
                sequence.positions.low_rank_places() if self.rotates else None,
                mask_QT,
            )
            outputs.append(lowrank_attention(query[b], tokens, scaling=scaling, softcap=softcap))
        return join_sequences(outputs)

    def dense(self) -> tuple[Tensor, Tensor]:
        """All keys (rotated) and values, rebuilt, (B, G, T, D) each."""
        pairs = [sequence.dense(self._rotation(b)) for b, sequence in enumerate(self.sequences)]
        return torch.stack([key for key, _ in pairs]), torch.stack([value for _, value in pairs])

    def _rotation(self, b: int) -> Rotation | None:
        return self.history.rotation(b, self.device) if self.rotates and self.history is not None else None

    def _unrotate(self, b: int) -> Rotate | None:
        return self.history.unrotate_rows(b) if self.rotates and self.history is not None else None


def _present(mask: Tensor, b: int, positions: slice) -> Tensor:
    """False for padding: tokens that no query of the call may see. A later call cannot bring them back."""
    return mask_of_row(mask, b)[:, positions].any(dim=0)


class OjaKVCache(LowRankCache):
    """Low-rank keys and values whose bases follow the text.

    ``model.generate(**inputs, past_key_values=OjaKVCache.from_model(model, config, bases=DIR))``
    """

    def __init__(self, model: PreTrainedModel, plan: Plan):
        """
        Args:
            model: the model to serve.
            plan: from :func:`ojakv.make_plan`; caches may share it.
        """
        geometry_of(model).check_equal(plan.geometry, "the plan")
        super().__init__(model, {index: OjaKVLayer(plan, index) for index in plan.layers})

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, config: OjaKVConfig, *, bases: str | Path | Calibration
    ) -> "OjaKVCache":
        """An empty cache for `model`.

        Args:
            config: the settings; see :meth:`OjaKVConfig.preset`.
            bases: a calibration of this model, or the directory to which `lowrank-kv calibrate` wrote it.

        Raises:
            UserError: the calibration is missing or damaged, or its model has another shape.
        """
        calibration = bases if isinstance(bases, Calibration) else Calibration.load(bases)
        return cls(model, make_plan(calibration.for_model(model), config))

    @property
    def updates(self) -> int:
        """Basis updates so far, over all layers, sequences, keys and values."""
        return sum(store.updates for store in self._stores())

    @property
    def refused_updates(self) -> int:
        """Steps left out because even a small share of them would have lost more than ``max_loss``, or moved stored rows
        further than ``max_drift``. Every step rounds integer coefficients again, which in int4 may cost this much."""
        return sum(store.guard.num_refused for store in self._stores())

    @property
    def kept_energy(self) -> float:
        """Mean share of stored coefficients' energy that survived all updates; 1.0 when nothing was lost.

        Each update loses at most ``max_loss`` of it. How far the directions of the rows have changed is :attr:`drift`.
        """
        kept = [store.guard.kept_energy for store in self._stores()]
        return sum(kept) / len(kept) if kept else 1.0

    @property
    def drift(self) -> float:
        """A bound on how far updates have moved stored rows, ‖now − when stored‖ / ‖now‖ over the rows of one layer's keys
        or values of one sequence, the largest of all; 0.0 when nothing has moved. It is at most ``max_drift``, unless crops
        and evictions have taken rows away since."""
        return max((store.drift() for store in self._stores()), default=0.0)

    def _stores(self) -> list[OnlineStore]:
        return [
            store
            for layer in self.compressed_layers()
            for sequence in layer.sequences
            for store in (sequence.key, sequence.value)
        ]
