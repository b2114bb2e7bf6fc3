"""The per-token gate: how many spectral coefficients a token keeps (DynaKV, section 3.2).

Shapes: B batch, T tokens, C joint width.
"""

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dynakv.fused_reconstruction import gated_reconstruction
from dynakv.mask import Truncation, cumulative
from dynakv.rank_gate import RankGate
from lowrank_kv.bases.hard_rank import hard_rank
from lowrank_kv.codec import TokenGate


class Gate(RankGate):
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
        # dtype → U, and (U, s, W, b) for compiled code, which all caches with this gate share.
        self._compiled_forms: dict[torch.dtype, tuple[Tensor, tuple[Tensor, ...]]] = {}

    @torch.no_grad()
    def initialize(self, energy_C: Tensor, decay: float) -> None:
        """Start with one mask for all tokens: p falls as exp(−decay · i / C) with the number i of dropped coefficients."""
        self._start(energy_C, -decay * torch.arange(self.bias.shape[0]) / self.bias.shape[0])

    @torch.no_grad()
    def initialize_at(self, energy_C: Tensor, rank: int, threshold: float) -> None:
        """Start with one mask for all tokens that the threshold cuts at `rank`.

        p falls from its peak as exp(−|i − i₀| / s), s = 4 coefficients (fewer of narrow states and at low ranks): so narrow
        that little is attenuated, so wide that training sees what a few coefficients more or less would do.

        Args:
            energy_C: second moment of each coefficient.
            rank: in 1..C.
            threshold: τ of equation 8.
        """
        width = len(energy_C)
        dropped_C = torch.arange(width)
        # Where the peak must lie depends on how much of p the ends cut off: of all peaks the best is taken.
        peak_K1 = torch.arange(-width, width + 1)[:, None]
        bias_KC = -(dropped_C - peak_K1).abs() / max(1.0, min(4.0, width / 16, rank / 4))
        rank_K = hard_rank(cumulative(bias_KC), threshold, granularity=1)
        self._start(energy_C, bias_KC[(rank_K - rank).abs().argmin()])

    def _start(self, energy_C: Tensor, bias_C: Tensor) -> None:
        # Directions the text never used have no energy; they are scaled as if they had a millionth of the largest.
        floor = energy_C.max() * 1e-6
        self.input_scale.copy_(energy_C.clamp(min=floor).rsqrt())
        self.weight.zero_()
        self.bias.copy_(bias_C)

    @torch.no_grad()
    def open(self) -> None:
        """Let p₀ = 1 and m = 1."""
        self.weight.zero_()
        self.bias.zero_()
        self.bias[0] = 200.0

    def fault_in(self, tensors: Mapping[str, Tensor]) -> str | None:
        is_positive = bool((tensors["input_scale"] > 0).all())
        return None if is_positive else "input_scale has numbers that are not positive"

    def energies(self) -> Tensor:
        """Calibrated second moment of each coefficient, (C,) fp32; training moves U away from it a little."""
        return self.input_scale.float().square().reciprocal()

    def affine(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(W with the scale of its inputs multiplied in, b) in `dtype`, differentiable."""
        return (self.input_scale[:, None] * self.weight).to(dtype), self.bias.to(dtype)

    def forward(self, coef_BTC: Tensor) -> Tensor:
        """cumsum(p) in fp32 (fp64 for fp64), (B, T, C): the mask read from its last coefficient to its first."""
        # Scaled weights of small states leave the range of fp16, and infinite logits would keep next to nothing.
        is_half = coef_BTC.dtype == torch.float16
        with torch.autocast(coef_BTC.device.type, enabled=False) if is_half else contextlib.nullcontext():
            coef_BTC = coef_BTC.float() if is_half else coef_BTC
            weight_CC, bias_C = self.affine(coef_BTC.dtype)
            return cumulative(coef_BTC @ weight_CC + bias_C)

    def keep(self, coef_BTC: Tensor, threshold: float, granularity: int) -> Tensor:
        return hard_rank(self(coef_BTC), threshold, granularity)

    def reconstruct(
        self, states_BTC: Tensor, basis_CC: Tensor, decoder_CC: Tensor, truncation: Truncation
    ) -> tuple[Tensor, Tensor, Tensor]:
        return gated_reconstruction(states_BTC, basis_CC, decoder_CC, *self.affine(states_BTC.dtype), truncation)

    def token_gate(self, basis_CC: Tensor, threshold: float, granularity: int) -> TokenGate:
        basis_CC, scale_C, weight_CC, bias_C = self._compiled_weights(basis_CC)
        return TokenGate(
            basis_CC=basis_CC,
            scale_C=scale_C,
            weight_CC=weight_CC,
            bias_C=bias_C,
            threshold=threshold,
            granularity=granularity,
        )

    def _compiled_weights(self, basis_CC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(U, s, W, b) of a :class:`TokenGate`; the same tensors until U or a parameter changes."""
        dtype = basis_CC.dtype
        if dtype == torch.float32:
            return basis_CC, self.input_scale, self.weight, self.bias
        # As in Projection: compared by content, and what is kept outlives the mode of this pass.
        with torch.inference_mode(False), torch.no_grad():
            weight_CC, bias_C = (tensor.float() for tensor in self.affine(dtype))
            found, kept = self._compiled_forms.get(dtype, (None, ()))
            if found is not basis_CC or not (torch.equal(kept[2], weight_CC) and torch.equal(kept[3], bias_C)):
                kept = basis_CC.float(), torch.ones_like(bias_C), weight_CC, bias_C
                self._compiled_forms[dtype] = basis_CC, kept
        return kept
