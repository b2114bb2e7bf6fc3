"""What a compressed cache asks of a method: rows to coefficients and back.

Shapes: B batch, T tokens, C joint width, R kept coefficients.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lowrank.eviction import Eviction
from lowrank.quantise import Quantisation, companding

Encoded = tuple[Tensor, Tensor]  # coefficients (B, T, C), ranks (B, T)


class Codec(Protocol):
    """Maps joint keys or values to coefficients of which each token keeps a prefix."""

    width: int

    def encode(self, states_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """(coef_BTC, rank_BT): the coefficients in order of importance, and how many each token keeps (int64)."""

    def decoder(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The (C, C) matrix whose first R rows rebuild a token from its first R coefficients."""

    def energies(self) -> Tensor:
        """About the second moment of each coefficient, (C,) fp32; asked for only where coefficients are quantised."""

    def token_gate(self) -> "TokenGate | None":
        """What :meth:`encode` does, for kernels that do it by themselves; None where it is something else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenGate:
    """x̃ = x U, of which a token keeps as many coefficients as cumulative sums of softmax(x̃ diag(s) W + b) exceed the
    threshold, rounded to the granularity (DynaKV, equations 1, 5, 6 and 8)."""

    basis_CC: Tensor
    scale_C: Tensor
    weight_CC: Tensor
    bias_C: Tensor
    threshold: float
    granularity: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCodec:
    """How one layer's keys (before rotation) and values are compressed and held, which tokens are, and whether a prompt's
    own attention sees exact keys and values or rebuilt ones.

    Attributes:
        encode_few: a faster way for a few new tokens: (rotated keys, values, rotation) → :data:`Encoded` of the keys and of
            the values, or None where it does not serve.
    """

    key: Codec
    value: Codec
    quantisation: Quantisation | None = None
    eviction: Eviction = Eviction()
    exact_prefill: bool = False
    encode_few: Callable[..., tuple[Encoded, Encoded] | None] | None = None

    def __post_init__(self):
        if self.quantisation is not None:
            for side in ("key", "value"):
                object.__setattr__(self, side, Companded(getattr(self, side)))

    def few(self, key_BGTD: Tensor, value_BGTD: Tensor, rope: Any) -> tuple[Encoded, Encoded] | None:
        """What :attr:`encode_few` gives, as it is held."""
        found = None if self.encode_few is None else self.encode_few(key_BGTD, value_BGTD, rope)
        if found is None or self.quantisation is None:
            return found
        for (coef_BTC, _), codec in zip(found, (self.key, self.value), strict=True):
            coef_BTC /= codec.spread_C
        return found


class Companded:
    """A codec whose coefficients are divided by their spread, so that one scale serves all of a token's; the decoder undoes
    it."""

    def __init__(self, codec: Codec):
        self.codec, self.width = codec, codec.width
        self.spread_C = companding(codec.energies())
        self._decoders: tuple[Tensor, Tensor] | None = None  # the codec's, and the same times the spread

    def encode(self, states_BTC: Tensor) -> tuple[Tensor, Tensor]:
        coef_BTC, rank_BT = self.codec.encode(states_BTC)
        return coef_BTC / self.spread_C.to(coef_BTC), rank_BT

    def decoder(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        plain_CC = self.codec.decoder(dtype, device)
        if self._decoders is None or self._decoders[0] is not plain_CC:
            self._decoders = plain_CC, self.spread_C.to(device, dtype)[:, None] * plain_CC
        return self._decoders[1]

    def energies(self) -> Tensor:
        return self.codec.energies() / self.spread_C.square()

    def token_gate(self) -> TokenGate | None:
        """The codec's own, of coefficients that are not divided yet."""
        return self.codec.token_gate()


def prefix_mask(rank_BT: Tensor, width: int) -> Tensor:
    """The hard mask of equation 2 (DynaKV): True for the first ``rank_BT`` of `width` coefficients, (B, T, C) bool."""
    return torch.arange(width, device=rank_BT.device) < rank_BT[..., None]
