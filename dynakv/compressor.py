"""Projection and gate together: what is done to keys, to values, or to both of several layers as one row.

Shapes: B batch, T tokens, C width: the joint width G·D of keys, and of values, the sum of those that are coded together.
"""

import abc

from torch import Tensor, nn

from dynakv.config import DynaKVConfig
from dynakv.projection import Projection


class TokenCompressor(nn.Module, abc.ABC):
    """Compresses keys, or values, of one layer, or rows of both of several."""

    def __init__(self, width: int, config: DynaKVConfig, name: str):
        super().__init__()
        self.width, self.config, self.name = width, config, name
        self.projection = Projection(width, decoder=self.kind_of_projection(config), name=name)
        self.gate = self.make_gate(width, config)

    @staticmethod
    @abc.abstractmethod
    def kind_of_projection(config: DynaKVConfig) -> str:
        """The `decoder` of :class:`Projection` that a compressor of these settings has."""

    @staticmethod
    @abc.abstractmethod
    def make_gate(width: int, config: DynaKVConfig) -> nn.Module:
        """What decides how much is kept of a token of `width` numbers."""

    @abc.abstractmethod
    def forward(self, states_BTC: Tensor, position_BT: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Compress and rebuild states without a cache: as trained in training mode, as stored at inference otherwise.

        Args:
            states_BTC: joint keys (before rotation) or values, floating point.
            position_BT: each token's place in its own document, int64; None where all are of one.

        Returns:
            the rebuilt states, same shape and dtype; the soft rate, a scalar that carries gradients; the hard rate of what
            is kept at inference, a scalar that does not. The two rates are equal where nothing is softer in training, and
            fp32 (fp64 in training on fp64 states).
        """
