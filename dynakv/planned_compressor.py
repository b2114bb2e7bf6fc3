"""A compressor that keeps of each token the coefficients that a plan gives bits, in these bits.

Shapes: B batch, T tokens, C width of the states, R coefficients that have bits at most.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynakv.compressor import TokenCompressor
from dynakv.config import DynaKVConfig
from dynakv.document_directions import DocumentDirections
from dynakv.planned_bits import PlannedBits
from dynakv.projection import RELATIVE
from lowrank_kv.calibration.bit_plans import CodedBasis
from lowrank_kv.hf.cache.windowed.own_directions import SharedSpace
from lowrank_kv.hf.cache.windowed.plan import InitialBasis


class PlannedCompressor(TokenCompressor):
    """Keeps of each token what the plan of its class says; a cache of low rank starts from it."""

    def __init__(self, width: int, config: DynaKVConfig, name: str):
        super().__init__(width, config, name)
        # U and the plan, what matters to directions of a text's own, and what was made of them
        self._made_initial: tuple[tuple, list[float] | None, Any] | None = None

    @staticmethod
    def kind_of_projection(config: DynaKVConfig) -> str:
        return RELATIVE

    @staticmethod
    def make_gate(width: int, config: DynaKVConfig) -> PlannedBits:
        return PlannedBits(width, learns_classes=bool(config.learned_classes))

    def initialize_coded(self, coder: CodedBasis) -> None:
        """Start from a training-free coder."""
        self.projection.initialize(coder.encoder_CC, coder.decoder_CC)
        self.gate.initialize(coder.plan, coder.importance_C)

    def forward(self, states_BTC: Tensor, position_BT: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`TokenCompressor.forward`. Rates are shares of bytes, and coefficients are computed in fp32, as for a
        store. Rates are those of rows, which have no more bytes with directions of a text's own.
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
        """What a cache starts from; the same object until a parameter changes."""
        return self._initial(InitialBasis.coded)

    def initial_bases(self, layers: int) -> list[tuple[InitialBasis, InitialBasis]]:
        """The same of rows of `layers` layers: what each layer's keys and values start from."""
        return self._initial(functools.partial(InitialBasis.coded_together, layers=layers))

    def _initial(self, make: Callable[..., Any]) -> Any:
        basis_CC, decoder_CC = self.projection.fixed_matrices(torch.float32, self.projection.weight.device)
        plan, has_own = self.gate.plan, self.config.own_directions > 0
        importance_C = self.gate.importance if has_own else None
        made_of, numbers = (basis_CC, plan), None if importance_C is None else importance_C.tolist()
        found = self._made_initial
        if found is None or found[1] != numbers or any(a is not b for a, b in zip(found[0], made_of, strict=True)):
            found = made_of, numbers, make(basis_CC, decoder_CC, plan, importance_C=importance_C)
            self._made_initial = found
        return found[2]
