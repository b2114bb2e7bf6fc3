"""Nested truncation: all tokens of a layer keep one number of coefficients, drawn at random in training (MatryoshkaKV).

A basis trained under every truncation at once orders its coefficients by what they are worth, whatever number is kept at
inference; that number is then allocated to a budget.

Shapes: B batch, T tokens, C joint width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dynakv.mask import Truncation
from dynakv.rank_gate import RankGate


class NestedRank(RankGate):
    """One rank for all tokens.

    Attributes:
        rank: how many coefficients are kept at inference, int64 scalar.
        drawn: how many the next training passes keep.
    """

    def __init__(self, width: int):
        super().__init__()
        self.drawn = width
        self.register_buffer("rank", torch.tensor(width))
        self.register_buffer("energy", torch.ones(width))

    @torch.no_grad()
    def initialize(self, energy_C: Tensor, decay: float) -> None:
        self.energy.copy_(energy_C)
        self.open()

    @torch.no_grad()
    def open(self) -> None:
        self.drawn = self.energy.shape[0]
        self.rank.fill_(self.drawn)

    def fault_in(self, tensors: Mapping[str, Tensor]) -> str | None:
        rank, width = int(tensors["rank"]), len(tensors["energy"])
        return None if 1 <= rank <= width else f"rank is {rank}, and must be from 1 to {width}"

    @property
    def rate(self) -> float:
        """Share of the coefficients that are kept at inference."""
        return int(self.rank) / len(self.energy)

    def energies(self) -> Tensor:
        """As calibrated, or measured after training."""
        return self.energy.float()

    def forward(self, coef_BTC: Tensor) -> Tensor:
        """How many coefficients each token keeps, (B, T) int64, all equal."""
        return self.rank.expand(coef_BTC.shape[:-1])

    def keep(self, coef_BTC: Tensor, threshold: float, granularity: int) -> Tensor:
        return self(coef_BTC)

    def reconstruct(
        self, states_BTC: Tensor, basis_CC: Tensor, decoder_CC: Tensor, truncation: Truncation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """With as many coefficients as were drawn."""
        rank = self.drawn
        rate = basis_CC.new_tensor(rank / len(self.energy), dtype=torch.float32)
        return states_BTC @ basis_CC[:, :rank] @ decoder_CC[:rank], rate, rate
