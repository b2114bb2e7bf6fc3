"""The interface between a method and the compressed caches: states to coefficients and back.

Shapes: B batch, T tokens, C joint width, R kept coefficients.
"""

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor

from lowrank_kv.eviction import Eviction
from lowrank_kv.stores.quantization import Quantization, coef_scale_of
from lowrank_kv.utils.derived import derived_from

Encoded = tuple[Tensor, Tensor]  # coefficients (B, T, C), ranks (B, T)
_SCALED = "coefficient scale, scaled decoder"


class Codec(Protocol):
    """Maps joint keys or values to coefficients of which each token keeps a prefix."""

    width: int

    def encode(self, states_BTC: Tensor) -> tuple[Tensor, Tensor]:
        """(coef_BTC, rank_BT): the coefficients in order of importance, and how many each token keeps (int64)."""

    def decoder(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The (C, C) matrix whose first R rows rebuild a token from its first R coefficients."""

    def energies(self) -> Tensor:
        """About the second moment of each coefficient, (C,) fp32; used only if coefficients are quantized."""

    def token_gate(self, dtype: torch.dtype) -> "TokenGate | None":
        """The weights by which :meth:`encode` works on states of `dtype`, for kernels that do the same; None if it does
        something else. They are the codec's own: caches that hold them share them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenGate:
    """The weights of a codec that projects a state and gates its coefficients (DynaKV, equations 1, 5, 6 and 8).

    The coefficients are x̃ = x U. A token keeps as many as there are cumulative sums of softmax(x̃ diag(s) W + b) above the
    threshold, rounded to the granularity. Tensors are fp32; for states of another dtype their numbers are those that torch
    rounds to it, which are U, diag(s) W, in place of W with s = 1, and b.

    Attributes:
        basis_CC: U.
        scale_C: s.
        weight_CC: W.
        bias_C: b.
        threshold: in (0, 1).
        granularity: ranks are multiples of it, at most C.
        coef_scale_C: coefficients are divided by it before they are stored; None if they are not.
    """

    basis_CC: Tensor
    scale_C: Tensor
    weight_CC: Tensor
    bias_C: Tensor
    threshold: float
    granularity: int
    coef_scale_C: Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCodec:
    """How one layer's keys and values are compressed.

    Attributes:
        key: of keys before rotation; wrapped in a :class:`ScaledCodec` if coefficients are quantized.
        value: of values, likewise.
        quantization: how coefficients are stored as integers; None to store them in the model's dtype.
        eviction: which tokens of a prompt are kept.
        exact_prefill: whether a prompt's own attention sees exact keys and values instead of rebuilt ones.
        settings: a dataclass of what else the codec goes by, which tells its saved caches from those of another.
    """

    key: Codec
    value: Codec
    quantization: Quantization | None = None
    eviction: Eviction = Eviction()
    exact_prefill: bool = False
    settings: Any = None

    def __post_init__(self):
        if self.quantization is not None:
            for name in ("key", "value"):
                object.__setattr__(self, name, ScaledCodec(getattr(self, name)))


class ScaledCodec:
    """A codec that divides another's coefficients by a scale of their own, so that one quantization scale serves all of a
    token's; its decoder multiplies by them."""

    def __init__(self, codec: Codec):
        self.codec, self.width = codec, codec.width
        self.coef_scale_C = coef_scale_of(codec.energies())
        self._rounded: dict[torch.dtype, Tensor] = {}  # the scale as it is in that dtype, fp32

    def encode(self, states_BTC: Tensor) -> tuple[Tensor, Tensor]:
        coef_BTC, rank_BT = self.codec.encode(states_BTC)
        return coef_BTC / self.coef_scale_C.to(coef_BTC), rank_BT

    def decoder(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        unscaled_CC = self.codec.decoder(dtype, device)
        derived = derived_from(unscaled_CC)
        scale_C, scaled_CC = derived.get(_SCALED, (None, None))
        if scale_C is None or not torch.equal(scale_C, self.coef_scale_C):
            with torch.inference_mode(False), torch.no_grad():  # the next cache may be of a pass with gradients
                scaled_CC = self.coef_scale_C.to(device, dtype)[:, None] * unscaled_CC
            derived[_SCALED] = self.coef_scale_C, scaled_CC
        return scaled_CC

    def energies(self) -> Tensor:
        return self.codec.energies() / self.coef_scale_C.square()

    def token_gate(self, dtype: torch.dtype) -> TokenGate | None:
        gate = self.codec.token_gate(dtype)
        if gate is None:
            return None
        if dtype not in self._rounded:
            self._rounded[dtype] = self.coef_scale_C.to(dtype).float()
        return dataclasses.replace(gate, coef_scale_C=self._rounded[dtype])


def prefix_mask(rank_BT: Tensor, width: int) -> Tensor:
    """The hard mask of equation 2 (DynaKV): True for the first ``rank_BT`` of `width` coefficients, (B, T, C) bool."""
    return torch.arange(width, device=rank_BT.device) < rank_BT[..., None]
