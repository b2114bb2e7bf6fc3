"""Soft thresholds: all tokens of a layer keep the coefficients whose singular value exceeds a learned threshold (STAR-KV).

A projection W of whitened inputs has factors A Σ B. The paper (arXiv 2606.08382) trains A Σ̃ B, whose rank falls by gradient
descent, with σ̃ = relu(σ − softplus(θ)). In the PCA of the states that W gives, A is the basis and σ the root of a
coefficient's energy, so that σ̃ / σ is a factor on each coefficient. Once ranks are fixed, what is kept is whole again, as in
the authors' code (github.com/PriyanshBhatnagar/STAR-KV, `DiagonalLinear`).

Shapes: B batch, T tokens, C joint width, R kept coefficients.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynakv.mask import Truncation
from dynakv.rank_gate import RankGate

_OPEN = -200.0  # θ of which softplus is zero in fp32
_LEAST = 1e-3  # of σ over the largest: directions that the text never used have none
_START = 0.5  # share of itself that the least σ loses at the start: ranks begin to fall as soon as thresholds move


class SoftThreshold(RankGate):
    """One rank for all tokens.

    Attributes:
        theta: θ, (1,). The threshold is softplus(θ) times the root mean square of σ.
        energy: σ², the calibrated second moment of each coefficient, falling, (C,) fp32.
        rank: how many coefficients are kept, int64 scalar; 0 while the threshold says it.
    """

    def __init__(self, width: int):
        super().__init__()
        self.theta = nn.Parameter(torch.full((1,), _OPEN))
        self.register_buffer("energy", torch.ones(width))
        self.register_buffer("rank", torch.tensor(0))

    @torch.no_grad()
    def initialize(self, energy_C: Tensor, decay: float) -> None:
        """Keep every coefficient, shrunk."""
        self.energy.copy_(energy_C)
        self.theta.fill_(math.log(math.expm1(_START * float(self._sigma()[-1]))))
        self.learn()

    @torch.no_grad()
    def open(self) -> None:
        self.theta.fill_(_OPEN)
        self.learn()

    def learn(self) -> None:
        """Let the threshold say how many coefficients are kept."""
        self.rank.zero_()

    def fix(self, rank: int) -> None:
        """Keep so many coefficients from now on, each of them whole."""
        self.rank.fill_(rank)

    @property
    def is_fixed(self) -> bool:
        """Whether the rank is."""
        return int(self.rank) > 0

    def fault_in(self, tensors: Mapping[str, Tensor]) -> str | None:
        rank, energy_C = int(tensors["rank"]), tensors["energy"]
        if not 0 <= rank <= len(energy_C):
            return f"rank is {rank}, and must be from 0 to {len(energy_C)}"
        return None if energy_C[0] > 0 else f"energy begins with {float(energy_C[0]):g}, and must be positive"

    def factors(self) -> Tensor:
        """What training multiplies the kept coefficients by, falling, (R,); carries gradients to θ. Their sum over C is the
        soft rate. One coefficient is left at least, though it be times zero."""
        if self.is_fixed:
            return (1 + 0 * self.theta).expand(int(self.rank))
        factor_C = F.relu(1 - F.softplus(self.theta) / self._sigma())
        return factor_C[: max(1, int((factor_C > 0).sum()))]

    def relative_energies(self) -> Tensor:
        """σ² over the threshold's square, falling, (C,): above 1 where a coefficient is kept."""
        return (self._sigma() / F.softplus(self.theta)).square()

    def _sigma(self) -> Tensor:
        """σ over its root mean square."""
        energy_C = self.energy.clamp(min=self.energy[0] * _LEAST**2)
        return (energy_C / energy_C.mean()).sqrt()

    @property
    def rate(self) -> float:
        """Share of the coefficients that are kept at inference."""
        return self._num_kept() / len(self.energy)

    @torch.no_grad()
    def _num_kept(self) -> int:
        return int(self.rank) or len(self.factors())

    def energies(self) -> Tensor:
        return self.energy.float()

    def forward(self, coef_BTC: Tensor) -> Tensor:
        """How many coefficients each token keeps, (B, T) int64, all equal."""
        return torch.full(coef_BTC.shape[:-1], self._num_kept(), device=coef_BTC.device)

    def keep(self, coef_BTC: Tensor, threshold: float, granularity: int) -> Tensor:
        return self(coef_BTC)

    def reconstruct(
        self, states_BTC: Tensor, basis_CC: Tensor, decoder_CC: Tensor, truncation: Truncation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """With coefficients times their :meth:`factors`."""
        factor_R, width = self.factors(), len(self.energy)
        rank = len(factor_R)
        coef_BTR = states_BTC @ basis_CC[:, :rank] * factor_R.to(states_BTC.dtype)
        return coef_BTR @ decoder_CC[:rank], factor_R.sum() / width, factor_R.new_tensor(rank / width)
