"""Projection and gate together: what is done to keys, to values, or to both of several layers as one row.

Shapes: B batch, T tokens, C width: the joint width G·D of keys, and of values, the sum of those that are coded together.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dynakv.config import NESTED, PLAN, SOFT_THRESHOLD, DynaKVConfig
from dynakv.document_directions import DocumentDirections
from dynakv.fused_reconstruction import Truncation, gated_reconstruction
from dynakv.gate import Gate, soft_mask
from dynakv.nested_rank import NestedRank
from dynakv.planned_bits import PlannedBits
from dynakv.projection import RELATIVE, Projection
from dynakv.soft_threshold import SoftThreshold
from lowrank_kv.bases.hard_rank import hard_rank
from lowrank_kv.bases.loss_weighted import WeightedBasis
from lowrank_kv.bases.pca import Basis
from lowrank_kv.calibration.bit_plans import CodedBasis
from lowrank_kv.codec import TokenGate, prefix_mask
from lowrank_kv.hf.cache.windowed.own_directions import SharedSpace
from lowrank_kv.hf.cache.windowed.plan import InitialBasis

AnyGate = Gate | NestedRank | PlannedBits | SoftThreshold


def kind_of_projection(config: DynaKVConfig) -> str:
    """The `decoder` of :class:`Projection` that a compressor of these settings has."""
    return RELATIVE if config.has_plan else config.decoder


class TokenCompressor(nn.Module):
    """Compresses keys, or values, of one layer, or rows of both of several; as a codec it serves the compressed cache."""

    def __init__(self, width: int, config: DynaKVConfig, name: str):
        super().__init__()
        self.width, self.config, self.name = width, config, name
        self.projection = Projection(width, decoder=kind_of_projection(config), name=name)
        self.gate = make_gate(width, config)
        # Late in training a straight-through run moves from the soft mask to the hard one.
        self.train_on_hard_mask = False
        self._made_initial: tuple[tuple, Any] | None = None  # U, plan and settings, and what was made of them
        # dtype → U, and (U, s, W, b) for compiled code, which all caches of this compressor share.
        self._gate_forms: dict[torch.dtype, tuple[Tensor, tuple[Tensor, ...]]] = {}

    def initialize(self, basis: Basis) -> None:
        """Start from a PCA basis of the joint states (one part) with a gate that keeps nearly everything."""
        [vectors_CC], [energy_C] = basis.vectors_PWW, basis.energy_PW
        self.projection.initialize(vectors_CC, vectors_CC.T)
        self.gate.initialize(energy_C, self.config.gate_decay)

    def initialize_at(self, basis: WeightedBasis, rank: int) -> None:
        """Start from a weighted basis with a gate that keeps `rank` coefficients of every token."""
        self.projection.initialize(basis.basis_CC, basis.inverse_CC)
        self.gate.initialize_at(basis.energy_C, rank, self.config.threshold)

    def initialize_coded(self, coder: CodedBasis) -> None:
        """Start from a training-free coder."""
        self.projection.initialize(coder.encoder_CC, coder.decoder_CC)
        self.gate.initialize(coder.plan, coder.importance_C)

    def forward(self, states_BTC: Tensor, position_BT: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Compress and rebuild states without a cache: as trained in training mode, as stored at inference otherwise.

        Args:
            states_BTC: joint keys (before rotation) or values, floating point.
            position_BT: each token's place in its own document, int64; None where all are of one.

        Returns:
            the rebuilt states, same shape and dtype; the mean soft mask, a scalar that carries gradients; the mean share of
            coefficients that the threshold keeps after rounding, a scalar that does not. The two rates are equal where
            there is no soft mask, and fp32 (fp64 in training on fp64 states).
        """
        if isinstance(self.gate, PlannedBits):
            return self._rounded(states_BTC, position_BT)
        if self.training and states_BTC.dtype == torch.float16:  # whose range scaled weights of a gate leave
            rebuilt_BTC, *rates = self._train_on(states_BTC.float())
            return rebuilt_BTC.half(), *rates
        if self.training:
            return self._train_on(states_BTC)
        coef_BTC, rank_BT = self.encode(states_BTC)
        rate = rank_BT.float().mean() / self.width
        decoder_CC = self.decoder(states_BTC.dtype, states_BTC.device)
        return (coef_BTC * prefix_mask(rank_BT, self.width)) @ decoder_CC, rate, rate

    def _train_on(self, states_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(self.gate, SoftThreshold):
            return self._shrunk(states_BTC)
        basis_CC, decoder_CC = (matrix.to(states_BTC.dtype) for matrix in self.projection.matrices())
        if isinstance(self.gate, NestedRank):
            rank = self.gate.drawn
            rate = basis_CC.new_tensor(rank / self.width, dtype=torch.float32)
            return states_BTC @ basis_CC[:, :rank] @ decoder_CC[:rank], rate, rate
        truncation = Truncation(
            threshold=self.config.threshold,
            granularity=self.config.granularity,
            on_hard_mask=self.train_on_hard_mask,
        )
        gate_CC, gate_C = self.gate.affine(states_BTC.dtype)
        return gated_reconstruction(states_BTC, basis_CC, decoder_CC, gate_CC, gate_C, truncation)

    def _shrunk(self, states_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same by a soft threshold."""
        basis_CC, decoder_CC = (matrix.to(states_BTC.dtype) for matrix in self.projection.matrices())
        factor_R = self.gate.factors()
        rank = len(factor_R)
        coef_BTR = states_BTC @ basis_CC[:, :rank] * factor_R.to(states_BTC.dtype)
        return coef_BTR @ decoder_CC[:rank], factor_R.sum() / self.width, factor_R.new_tensor(rank / self.width)

    def _rounded(self, states_BTC: Tensor, position_BT: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The same by a plan: rates are shares of bytes, and coefficients are computed in fp32, as for a store.

        Rates are those of rows, which have no more bytes with directions of a text's own.
        """
        if self.training:
            basis_CC, decoder_CC = self.projection.matrices()
        else:
            basis_CC, decoder_CC = self.projection.fixed_matrices(torch.float32, states_BTC.device)
        with torch.autocast(states_BTC.device.type, enabled=False):
            coef_BTC = states_BTC.float() @ basis_CC
            if self.config.own_directions:
                shared = SharedSpace.weighed(self.gate.importance, decoder_CC)
                own = DocumentDirections.find(coef_BTC, position_BT, shared, self.gate.plan, self.config)
                row_BTR, *rates = self.gate(coef_BTC, own.encode(coef_BTC))
                rebuilt_BTC = own.decode(row_BTR)
            else:
                row_BTR, *rates = self.gate(coef_BTC)
                rebuilt_BTC = row_BTR @ decoder_CC[: row_BTR.shape[-1]]
        return rebuilt_BTC.to(states_BTC.dtype), *rates

    def initial_basis(self) -> InitialBasis:
        """What a cache starts from where there is a plan; the same object until a parameter changes."""
        return self._initial(InitialBasis.coded)

    def initial_bases(self, layers: int) -> list[tuple[InitialBasis, InitialBasis]]:
        """The same of rows of so many layers: what each layer's keys and values start from."""
        return self._initial(functools.partial(InitialBasis.coded_together, layers=layers))

    def _initial(self, make: Callable[..., Any]) -> Any:
        basis_CC, decoder_CC = self.projection.fixed_matrices(torch.float32, self.projection.weight.device)
        plan, has_own = self.gate.plan, self.config.own_directions > 0
        made_of = basis_CC, plan, has_own
        found = self._made_initial
        if found is None or any(a is not b for a, b in zip(found[0], made_of, strict=True)):
            importance_C = self.gate.importance if has_own else None
            found = made_of, make(basis_CC, decoder_CC, plan, importance_C=importance_C)
            self._made_initial = found
        return found[1]

    def encode(self, states_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """(coef_BTC, rank_BT) as stored at inference (equations 1, 5, 6 and 8)."""
        basis_CC, _ = self.projection.fixed_matrices(states_BTC.dtype, states_BTC.device)
        coef_BTC = states_BTC @ basis_CC
        if self.config.mask == "soft_prefix":
            cumulative_BTC = self.gate(coef_BTC)
            rank_BT = hard_rank(cumulative_BTC, self.config.threshold, self.config.granularity)
            return coef_BTC * soft_mask(cumulative_BTC).to(coef_BTC.dtype), rank_BT
        return coef_BTC, self.gate.keep(coef_BTC, self.config.threshold, self.config.granularity)

    def energies(self) -> Tensor:
        """About the second moment of each coefficient, (C,) fp32."""
        return self.gate.energies()

    def token_gate(self, dtype: torch.dtype) -> TokenGate | None:
        if self.config.mask == "soft_prefix" or not isinstance(self.gate, Gate):
            return None
        basis_CC, scale_C, weight_CC, bias_C = self._gate_weights(dtype)
        return TokenGate(
            basis_CC=basis_CC,
            scale_C=scale_C,
            weight_CC=weight_CC,
            bias_C=bias_C,
            threshold=self.config.threshold,
            granularity=self.config.granularity,
        )

    def _gate_weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(U, s, W, b) of a :class:`TokenGate`; the same tensors until a parameter changes."""
        gate = self.gate
        basis_CC, _ = self.projection.fixed_matrices(dtype, gate.weight.device)
        if dtype == torch.float32:
            return basis_CC, gate.input_scale, gate.weight, gate.bias
        # As in Projection: compared by content, and what is kept outlives the mode of this pass.
        with torch.inference_mode(False), torch.no_grad():
            weight_CC, bias_C = (tensor.float() for tensor in gate.affine(dtype))
            found, kept = self._gate_forms.get(dtype, (None, ()))
            if found is not basis_CC or not (torch.equal(kept[2], weight_CC) and torch.equal(kept[3], bias_C)):
                kept = basis_CC.float(), torch.ones_like(bias_C), weight_CC, bias_C
                self._gate_forms[dtype] = basis_CC, kept
        return kept

    def decoder(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.projection.fixed_matrices(dtype, device)[1]


def make_gate(width: int, config: DynaKVConfig) -> AnyGate:
    """What decides how much of a token is kept."""
    if config.rank_policy == PLAN:
        return PlannedBits(width, learns_classes=bool(config.learned_classes))
    return {NESTED: NestedRank, SOFT_THRESHOLD: SoftThreshold}.get(config.rank_policy, Gate)(width)
