"""The per-token gate: how many spectral coefficients a token keeps (DynaKV, section 3.2).

Shapes: B batch, T tokens, C joint width.
"""

import torch
from torch import Tensor, nn


class Gate(nn.Module):
    """p = softmax(x̃ W + b); m = flip(cumsum(p)) (equations 5 and 6).

    p is a distribution over how many trailing coefficients to drop, m falls from 1 to p₀ along the coefficients.
    The input is divided by the root of each coefficient's energy: unscaled, the leading coefficients, hundreds of times
    larger, would drown the rest.
    """

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("input_scale", torch.ones(width))

    @torch.no_grad()
    def initialise(self, energy_C: Tensor, decay: float) -> None:
        """Start with one mask for all tokens that keeps nearly everything.

        Args:
            energy_C: second moment of each coefficient.
            decay: p falls as exp(−decay · i / C) with the number i of dropped coefficients.
        """
        # Directions the text never used have no energy; they are scaled as if they had a millionth of the largest.
        floor = energy_C.max() * 1e-6
        self.input_scale.copy_(energy_C.clamp(min=floor).rsqrt())
        self.weight.zero_()
        self.bias.copy_(-decay * torch.arange(self.bias.shape[0]) / self.bias.shape[0])

    @torch.no_grad()
    def open(self) -> None:
        """Keep every coefficient of every token, exactly: p₀ = 1 and m = 1."""
        self.weight.zero_()
        self.bias.zero_()
        self.bias[0] = 200.0

    def forward(self, coef_BTC: Tensor) -> Tensor:
        """cumsum(p) in fp32, (B, T, C): the mask read from its last coefficient to its first."""
        weight_CC = (self.input_scale[:, None] * self.weight).to(coef_BTC.dtype)
        logit_BTC = coef_BTC @ weight_CC + self.bias.to(coef_BTC.dtype)
        return logit_BTC.float().softmax(dim=-1).cumsum(dim=-1)


def soft_mask(cumulative_BTC: Tensor) -> Tensor:
    """m of equation 6 from the gate's output."""
    return cumulative_BTC.flip(-1)
