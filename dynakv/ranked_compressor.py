"""A compressor that keeps of each token a number of coefficients, as the paper's does.

Shapes: B batch, T tokens, C joint width.
"""

import torch
from torch import Tensor

from dynakv.compressor import TokenCompressor
from dynakv.config import GATE, NESTED, SOFT_THRESHOLD, DynaKVConfig
from dynakv.gate import Gate
from dynakv.mask import Truncation, soft_mask
from dynakv.nested_rank import NestedRank
from dynakv.rank_gate import RankGate
from dynakv.soft_threshold import SoftThreshold
from lowrank_kv.bases.hard_rank import hard_rank
from lowrank_kv.bases.loss_weighted import WeightedBasis
from lowrank_kv.bases.pca import Basis
from lowrank_kv.codec import TokenGate, prefix_mask

_GATES = {GATE: Gate, NESTED: NestedRank, SOFT_THRESHOLD: SoftThreshold}


class RankedCompressor(TokenCompressor):
    """Keeps the first coefficients of each token, as many as its gate says; as a codec it serves the compressed cache."""

    def __init__(self, width: int, config: DynaKVConfig, name: str):
        super().__init__(width, config, name)
        # Late in training a straight-through run moves from the soft mask to the hard one.
        self.train_on_hard_mask = False

    @staticmethod
    def kind_of_projection(config: DynaKVConfig) -> str:
        return config.decoder

    @staticmethod
    def make_gate(width: int, config: DynaKVConfig) -> RankGate:
        return _GATES[config.rank_policy](width)

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
        return self.gate.reconstruct(states_BTC, basis_CC, decoder_CC, truncation)

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
        if self.config.mask == "soft_prefix":
            return None
        basis_CC, _ = self.projection.fixed_matrices(dtype, self.projection.weight.device)
        return self.gate.token_gate(basis_CC, self.config.threshold, self.config.granularity)
