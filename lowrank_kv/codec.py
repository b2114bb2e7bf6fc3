"""What a compressed cache asks of a method: rows to coefficients and back.

Shapes: B batch, T tokens, C joint width, R kept coefficients.
"""

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from lowrank_kv.eviction import Eviction
from lowrank_kv.stores.quantization import Quantization, coef_scale_of

Encoded = tuple[Tensor, Tensor]  # coefficients (B, T, C), ranks (B, T)


class Codec(Protocol):
    """Maps joint keys or values to coefficients of which each token keeps a prefix."""

    width: int

    def encode(self, states_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """(coef_BTC, rank_BT): the coefficients in order of importance, and how many each token keeps (int64)."""

    def decoder(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The (C, C) matrix whose first R rows rebuild a token from its first R coefficients."""

    def energies(self) -> Tensor:
        """About the second moment of each coefficient, (C,) fp32; asked for only where coefficients are quantized."""

    def token_gate(self) -> "TokenGate | None":
        """What :meth:`encode` does, for kernels that do it by themselves; None where it is something else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenGate:
    """x̃ = x U, of which a token keeps as many coefficients as cumulative sums of softmax(x̃ diag(s) W + b) exceed the
    threshold, rounded to the granularity (DynaKV, equations 1, 5, 6 and 8). They are held divided by their spread, if there
    is one."""

    basis_CC: Tensor
    scale_C: Tensor
    weight_CC: Tensor
    bias_C: Tensor
    threshold: float
    granularity: int
    coef_scale_C: Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCodec:
    """How one layer's keys (before rotation) and values are compressed and held, which tokens are, and whether a prompt's
    own attention sees exact keys and values or rebuilt ones."""

    key: Codec
    value: Codec
    quantization: Quantization | None = None
    eviction: Eviction = Eviction()
    exact_prefill: bool = False

    def __post_init__(self):
        if self.quantization is not None:
            for side in ("key", "value"):
                object.__setattr__(self, side, ScaledCodec(getattr(self, side)))


class ScaledCodec:
    """A codec whose coefficients are divided by their spread, so that one scale serves all of a token's; the decoder undoes
    it."""

    def __init__(self, codec: Codec):
        self.codec, self.width = codec, codec.width
        self.coef_scale_C = coef_scale_of(codec.energies())
        self._decoders: tuple[Tensor, Tensor] | None = None  # the codec's, and the same times the spread

    def encode(self, states_BTC: Tensor) -> tuple[Tensor, Tensor]:
        coef_BTC, rank_BT = self.codec.encode(states_BTC)
        return coef_BTC / self.coef_scale_C.to(coef_BTC), rank_BT

    def decoder(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        plain_CC = self.codec.decoder(dtype, device)
        if self._decoders is None or self._decoders[0] is not plain_CC:
            self._decoders = plain_CC, self.coef_scale_C.to(device, dtype)[:, None] * plain_CC
        return self._decoders[1]

    def energies(self) -> Tensor:
        return self.codec.energies() / self.coef_scale_C.square()

    def token_gate(self) -> TokenGate | None:
        gate = self.codec.token_gate()
        return None if gate is None else dataclasses.replace(gate, coef_scale_C=self.coef_scale_C)


def prefix_mask(rank_BT: Tensor, width: int) -> Tensor:
    """The hard mask of equation 2 (DynaKV): True for the first ``rank_BT`` of `width` coefficients, (B, T, C) bool."""
    return torch.arange(width, device=rank_BT.device) < rank_BT[..., None]
