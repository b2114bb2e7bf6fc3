"""What all caches of one configuration share: how each layer's keys and values become coefficients.

Shapes: P parts (G KV heads of width D, or one of joint width C = G·D), W width of a part, R rank.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.types import Device

from lowrank_kv.hf.cache.windowed.config import WindowedConfig
from lowrank_kv.hf.cache.windowed.own_directions import LastDecoder, OwnDirections, SharedSpace
from lowrank_kv.hf.cache.windowed.retention import RetentionSchedule
from lowrank_kv.hf.geometry import KVGeometry
from lowrank_kv.hf.rope import POSITION_BYTES
from lowrank_kv.ops.native import compiled_writer
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.quantization import IntegerQuantization, Quantization, coef_scale_of
from lowrank_kv.stores.token_plans import TokenPlans


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialBasis:
    """The basis in which one layer's keys, or values, start.

    Attributes:
        vectors_PWR: coefficients are states · vectors, fp32; orthonormal columns, unless there is a decoder.
        energy_PR: mean energy of the calibration's states along them, fp32.
        decoder_PWR: states are decoder · coefficients, fp32; None where that is `vectors_PWR`.
        quantization: how coefficients are stored in fewer bits, or by the class of their token; None to store them in the
            model's dtype.
        is_compressed: False for the identity, where keys or values are stored uncompressed.
        shared: what each sequence finds directions of its own beside; None where none does.
        holds_rows: False where coefficients are in the rows of other keys, which are x · vectors of all that share them
            added up (:class:`lowrank_kv.hf.cache.windowed.rows.JointRows`).
    """

    vectors_PWR: Tensor
    energy_PR: Tensor
    decoder_PWR: Tensor | None = None
    quantization: Quantization | TokenPlans | None = None
    is_compressed: bool = True
    shared: SharedSpace | None = None
    holds_rows: bool = True

    @classmethod
    def identity(
        cls, parts: int, width: int, *, rank: int | None = None, is_compressed: bool = False, device: Device = "cpu"
    ) -> "InitialBasis":
        """The basis of states as they are, or of their first `rank` numbers, fp32.

        Args:
            is_compressed: whether they are stored as coefficients all the same.
            device: by name, as torch's default may be another.
        """
        rank = width if rank is None else rank
        return cls(
            vectors_PWR=by_columns(torch.eye(width, dtype=torch.float32, device=device)[:, :rank].repeat(parts, 1, 1)),
            energy_PR=torch.ones(parts, rank, dtype=torch.float32, device=device),
            is_compressed=is_compressed,
        )

    @classmethod
    def coded(
        cls,
        encoder_CC: Tensor,
        decoder_CC: Tensor,
        plan: BitPlan | TokenPlans,
        *,
        importance_C: Tensor | None = None,
        holds_rows: bool = True,
    ) -> "InitialBasis":
        """The basis of joint states whose coefficients x · encoder are packed by a plan, or by one for each class of tokens.

        The last coefficients may be left out, but a gate reads them all, and so do sequences with directions of their own.

        Args:
            encoder_CC, decoder_CC: of keys and values that are coded together, the rows of the one and the columns of the
                other that belong to these.
            importance_C: what the loss asks of each coefficient, where sequences have directions of their own.
        """
        rank = plan.num_coefficients
        read = rank if isinstance(plan, BitPlan) and importance_C is None else encoder_CC.shape[1]
        return cls(
            # Copies, because views would keep all directions in memory.
            vectors_PWR=by_columns(encoder_CC[None, :, :read].clone()),
            energy_PR=torch.ones(1, read, dtype=torch.float32, device=encoder_CC.device),
            decoder_PWR=by_columns(decoder_CC[None, :rank].mT.clone()),
            quantization=plan,
            shared=None if importance_C is None else SharedSpace.weighed(importance_C, decoder_CC),
            holds_rows=holds_rows,
        )

    @classmethod
    def coded_together(
        cls,
        encoder_CC: Tensor,
        decoder_CC: Tensor,
        plan: BitPlan | TokenPlans,
        *,
        layers: int,
        importance_C: Tensor | None = None,
    ) -> list[tuple["InitialBasis", "InitialBasis"]]:
        """The same of rows [key, value, key, value, …] of so many layers: the bases of each layer's keys and values. The
        keys of the last one hold the rows."""
        width = len(encoder_CC) // (2 * layers)
        sides = []
        for place in range(2 * layers):
            of_side = slice(place * width, (place + 1) * width)
            sides.append(
                cls.coded(
                    encoder_CC[of_side],
                    decoder_CC[:, of_side],
                    plan,
                    importance_C=importance_C,
                    holds_rows=place == 2 * (layers - 1),
                )
            )
        return list(zip(sides[::2], sides[1::2], strict=True))

    @property
    def parts(self) -> int:
        return self.vectors_PWR.shape[0]

    @property
    def stored_parts(self) -> int:
        """How many rows of a token are stored."""
        return self.parts if self.holds_rows else 0

    def __getstate__(self) -> dict[str, Any]:
        # What is made of the fields is made again: a saved cache may go on where there is no compiled code.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @functools.cached_property
    def coef_scale(self) -> Tensor | None:
        """The scale that coefficients are divided by to be held as integers, (P, R) fp32; None where they are not."""
        return coef_scale_of(self.energy_PR) if isinstance(self.quantization, IntegerQuantization) else None

    @functools.cached_property
    def writer(self) -> Any:
        """What encodes rows: compiled code that does as the quantization does, or where there is none, the quantization."""
        return compiled_writer(self.quantization, self.vectors_PWR.device) or self.quantization

    @property
    def rank(self) -> int:
        """R, how many coefficients a token keeps at most."""
        return (self.vectors_PWR if self.decoder_PWR is None else self.decoder_PWR).shape[2]

    @property
    def drops_some(self) -> bool:
        """Whether the plan leaves coefficients of some tokens out."""
        plan, read = self.quantization, self.vectors_PWR.shape[2]
        plans = plan.plans if isinstance(plan, TokenPlans) else (plan,) if isinstance(plan, BitPlan) else ()
        return any(each.num_coefficients < read for each in plans)

    def decoder(self, dtype: torch.dtype) -> Tensor:
        """:attr:`decoder_PWR` in a dtype; all caches share one copy."""
        if dtype not in self._decoders:
            self._decoders[dtype] = self.decoder_PWR.to(dtype)
        return self._decoders[dtype]

    def prepared(self, dtype: torch.dtype) -> dict[str, Any]:
        """Copies of :meth:`decoder` in the layouts that attention reads, by name; all caches share them."""
        return self._prepared.setdefault(dtype, {})

    def decoder_with(self, own: OwnDirections, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
        """The decoder with a sequence's own directions, (1, W, R), and what attention has made of it.

        The one that was asked for last is kept, once for all caches and as little counted as the shared decoder, until its
        sequence is gone: each sequence would otherwise hold a whole basis more. Sequences of a batch take turns, and each
        makes its own anew.
        """
        return self._last_decoder.of(own, dtype, lambda: own.decoder(self.shared, self.rank).to(dtype).mT[None])

    @functools.cached_property
    def _last_decoder(self) -> LastDecoder:
        return LastDecoder()

    @functools.cached_property
    def _decoders(self) -> dict[torch.dtype, Tensor]:
        return {}

    @functools.cached_property
    def _prepared(self) -> dict[torch.dtype, dict[str, Any]]:
        return {}

    def to(self, device: torch.device) -> "InitialBasis":
        moved = {"vectors_PWR": self.vectors_PWR.to(device), "energy_PR": self.energy_PR.to(device)}
        if self.decoder_PWR is not None:
            moved["decoder_PWR"] = self.decoder_PWR.to(device)
        if isinstance(self.quantization, (BitPlan, TokenPlans)):
            moved["quantization"] = self.quantization.to(device)
        if self.shared is not None:
            moved["shared"] = self.shared.to(device)
        return dataclasses.replace(self, **moved)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the caches of one configuration start from, and share.

    Attributes:
        layers: layer index → (keys, values).
        rotation_bytes: what a cache keeps of each token's rotation, for all layers.
    """

    config: WindowedConfig
    geometry: KVGeometry
    layers: dict[int, tuple[InitialBasis, InitialBasis]]
    rotation_bytes: int = POSITION_BYTES

    @classmethod
    def of_bases(
        cls,
        config: WindowedConfig,
        geometry: KVGeometry,
        bases: Sequence[InitialBasis],
        *,
        rotation_bytes: int = POSITION_BYTES,
    ) -> "Plan":
        """From the bases of all compressed layers in order: keys, values, keys, values, …"""
        layers = dict(zip(geometry.layers, zip(bases[::2], bases[1::2], strict=True), strict=True))
        return cls(config=config, geometry=geometry, layers=layers, rotation_bytes=rotation_bytes)

    def pair(self, index: int, device: torch.device) -> tuple[InitialBasis, InitialBasis]:
        """The bases of a layer's keys and values on `device`; all caches share one copy."""
        kv = self.layers[index]
        if kv[0].vectors_PWR.device == device:
            return kv
        if (index, device) not in self._elsewhere:
            self._elsewhere[index, device] = tuple(initial.to(device) for initial in kv)
        return self._elsewhere[index, device]

    @functools.cached_property
    def _elsewhere(self) -> dict[tuple[int, torch.device], tuple[InitialBasis, InitialBasis]]:
        return {}

    def schedule(self, index: int) -> RetentionSchedule:
        """When tokens of a layer are compressed."""
        return RetentionSchedule.of_layer(self.config, list(self.layers).index(index), len(self.layers))

    def row_groups(self) -> list[tuple[int, ...]]:
        """The layers that share their rows, each of the others by itself."""
        groups, group = [], ()
        for index, (key, _) in self.layers.items():
            group += (index,)
            if key.holds_rows:
                groups.append(group)
                group = ()
        return groups

    @property
    def coefficient_rate(self) -> float:
        """Coefficients of a compressed token over the numbers of an uncompressed one."""
        kept = sum(initial.stored_parts * initial.rank for kv in self.layers.values() for initial in kv)
        return kept / (2 * self.geometry.width * len(self.layers))


def eviction_parts(kv: tuple[InitialBasis, InitialBasis]) -> int:
    """How many parts choose for themselves which tokens to forget: heads that share coefficients choose together."""
    return min(initial.parts for initial in kv)


def by_columns(matrix_PWR: Tensor) -> Tensor:
    """The same matrix with the numbers of each column side by side, as attention reads a basis at every token."""
    return matrix_PWR if matrix_PWR.mT.is_contiguous() else matrix_PWR.mT.contiguous().mT
