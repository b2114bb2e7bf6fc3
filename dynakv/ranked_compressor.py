"""A compressor that keeps of each token a number of coefficients, as the paper's does.

Shapes: B batch, T tokens, C joint width.
"""

import torch
from torch import Tensor

from dynakv.compressor import TokenCompressor
from dynakv.config import DynaKVConfig
from dynakv.mask import Truncation, soft_mask
from lowrank_kv.bases.hard_rank import hard_rank
from lowrank_kv.bases.loss_weighted import WeightedBasis
from lowrank_kv.bases.pca import Basis
from lowrank_kv.codec import TokenGate, prefix_mask


class RankedCompressor(TokenCompressor):
    """Keeps the first coefficients of each token, as many as its gate says; as a codec it serves the compressed cache."""

    def __init__(self, width: int, config: DynaKVConfig, name: str):
        super().__init__(width, config, name)
        # Late in training a straight-through run moves from the soft mask to the hard one.
        self.train_on_hard_mask = False
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

    def forward(self, states_BTC: Tensor, position_BT: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
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
        truncation = Truncation(
            threshold=self.config.threshold,
            granularity=self.config.granularity,
            on_hard_mask=self.train_on_hard_mask,
        )
        basis_CC, decoder_CC = (matrix.to(states_BTC.dtype) for matrix in self.projection.matrices())
        return self.gate.rebuilt(states_BTC, basis_CC, decoder_CC, truncation)

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
        """As :meth:`dynakv.rank_gate.RankGate.energies`."""
        return self.gate.energies()

    def decoder(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """V of equation 3, (C, C)."""
        return self.projection.fixed_matrices(dtype, device)[1]

    def token_gate(self, dtype: torch.dtype) -> TokenGate | None:
        if self.config.mask == "soft_prefix" or not self.config.has_gates:
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
