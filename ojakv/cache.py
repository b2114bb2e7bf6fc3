"""The OjaKV cache that stock `generate()` drives.

Shapes: B batch, H query heads, G KV heads, D head dim, Q new tokens, T cached tokens.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowrank.hf.backends import Backend
from lowrank.hf.cache import LowRankCache
from lowrank.hf.calibration_store import Calibration
from lowrank.hf.geometry import geometry_of
from lowrank.hf.layer import MAX_DECODE_QUERIES, CompressedLayer
from lowrank.hf.rope import Rope
from lowrank.ops.lowrank_attention import lowrank_attention
from lowrank.ops.rotation import Rotate, Rotation
from ojakv.config import OjaKVConfig
from ojakv.plan import Plan, SideBasis, make_plan
from ojakv.sequence import OnlineSequence


class OjaKVLayer(CompressedLayer):
    """One layer whose bases follow each sequence (OjaKV, Algorithm 1)."""

    def __init__(self, bases: tuple[SideBasis, SideBasis], config: OjaKVConfig, index: int):
        super().__init__()
        self.bases, self.config, self.index = bases, config, index
        self.record_past = False
        self._new: tuple[Tensor, Tensor] | None = None  # tokens of the running call, until they are attended

    @property
    def rotates(self) -> bool:
        return self.config.rotates

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.bases = tuple(side.to(key_states.device) for side in self.bases)
        super().lazy_initialization(key_states, value_states)

    def activate_past_recording(self) -> None:
        """From now on the tokens of any call may be cropped right after it, a prompt's too: `generate()` with drafts."""
        self.record_past = True

    def new_sequence(self) -> OnlineSequence:
        return OnlineSequence(self.bases, self.config, head_dim=self.head_dim, dtype=self.dtype, layer=self.index)

    def take(self, key_BGQD: Tensor, value_BGQD: Tensor, rope: Rope | None) -> None:
        self._new = (key_BGQD, value_BGQD)

    def attend_cached(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """A prompt, and long chunks after it, run `inner` on exact or rebuilt states; a few queries at a time attend in
        the low-rank space, unless the configuration asks for rebuilding there, too."""
        (key, value), self._new = self._new, None
        past, scaling = self.get_seq_length(), kwargs["scaling"]
        self._append(key, value, mask, past)
        is_exact = self.config.prefill == "exact"
        # Few tokens after others may be drafts, whoever drives the cache.
        may_be_cropped = self.record_past or bool(past and query.shape[2] <= MAX_DECODE_QUERIES)
        if not is_exact:
            self._settle(query, scaling, may_be_cropped)
        if past and query.shape[2] <= MAX_DECODE_QUERIES and self.config.attention == "low_rank":
            output = self._attend_low_rank(query, mask, scaling, inner.softcap(kwargs)), None
        else:
            if past or not is_exact:
                key, value = self.dense()
            output = inner(module, query, key, value, mask, **kwargs)
        if is_exact:
            self._settle(query, scaling, may_be_cropped)
        return output

    def _append(self, key: Tensor, value: Tensor, mask: Tensor | None, past: int) -> None:
        for b, sequence in enumerate(self.sequences):
            present_Q = None
            if mask is not None:
                # What no query may see is padding.
                present_Q = mask[b if mask.shape[0] > 1 else 0, 0, :, past : past + key.shape[2]].any(dim=0)
            sequence.append(key[b], value[b], present_Q)

    def _settle(self, query: Tensor, scaling: float, may_be_cropped: bool) -> None:
        for b, sequence in enumerate(self.sequences):
            rotation, unrotate = self._rotation(b), self._unrotate(b)
            sequence.settle(query[b], scaling, rotation, unrotate, may_be_cropped=may_be_cropped)

    def _attend_low_rank(self, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None) -> Tensor:
        outputs = []
        for b, sequence in enumerate(self.sequences):
            mask_QT = None
            if mask is not None:
                order_T = torch.cat([sequence.low_position(), sequence.full_position.rows.long()])
                mask_QT = mask[b if mask.shape[0] > 1 else 0, 0][:, order_T]
            outputs.append(
                lowrank_attention(
                    query[b],
                    sequence.key.operands(),
                    sequence.value.operands(),
                    scaling=scaling,
                    rotation=self._rotation(b),
                    places=sequence.low_places() if self.rotates else None,
                    softcap=softcap,
                    mask_QT=mask_QT,
                )
            )
        return torch.stack(outputs).transpose(1, 2).contiguous()

    def dense(self) -> tuple[Tensor, Tensor]:
        """All keys (rotated) and values as the cache gives them back, (B, G, T, D) each."""
        pairs = [sequence.dense(self._rotation(b)) for b, sequence in enumerate(self.sequences)]
        return torch.stack([key for key, _ in pairs]), torch.stack([value for _, value in pairs])

    def _rotation(self, b: int) -> Rotation | None:
        return self.history.rotation(b, self.device) if self.rotates and self.history is not None else None

    def _unrotate(self, b: int) -> Rotate | None:
        return self.history.unrotate_rows(b) if self.rotates and self.history is not None else None


class OjaKVCache(LowRankCache):
    """Low-rank keys and values whose bases follow the text.

    ``model.generate(**inputs, past_key_values=OjaKVCache.from_model(model, config, bases=DIR))``
    """

    def __init__(self, model: PreTrainedModel, plan: Plan):
        """
        Args:
            model: the model to serve.
            plan: from :func:`ojakv.make_plan`; many caches may share one.
        """
        geometry_of(model).check_equal(plan.geometry, "the plan")
        super().__init__(model, {index: OjaKVLayer(bases, plan.config, index) for index, bases in plan.layers.items()})

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, config: OjaKVConfig, *, bases: str | Path | Calibration
    ) -> "OjaKVCache":
        """An empty cache for `model`.

        Args:
            config: the settings; see :meth:`OjaKVConfig.preset`.
            bases: a calibration of this very model, or the directory `scripts/calibrate.py` wrote it to.

        Raises:
            UserError: the calibration is missing, damaged, or of a model of another shape.
        """
        calibration = bases if isinstance(bases, Calibration) else Calibration.load(bases)
        return cls(model, make_plan(calibration.for_model(model), config))

    @property
    def updates(self) -> int:
        """Basis updates so far, over all layers, sides and sequences."""
        return sum(side.updates for side in self._sides())

    @property
    def kept_energy(self) -> float:
        """Mean share of stored coefficients' energy that survived all updates; 1.0 when nothing was lost.

        Each update loses at most ``max_loss`` of it.
        """
        kept = [side.kept_energy for side in self._sides()]
        return sum(kept) / len(kept) if kept else 1.0

    def _sides(self) -> list:
        return [
            side
            for layer in self.compressed_layers()
            for sequence in layer.sequences
            for side in (sequence.key, sequence.value)
        ]
