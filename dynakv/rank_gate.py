"""What says how many coefficients of a token are kept: the interface of all ways, of which the paper's gate is one.

Shapes: B batch, T tokens, C joint width.
"""

import abc
from collections.abc import Mapping

from torch import Tensor, nn

from dynakv.mask import Truncation
from lowrank_kv.codec import TokenGate


class RankGate(nn.Module, abc.ABC):
    """Keeps the first coefficients of each token: as many as it finds in the token, or one number for all.

    Those of one number have the share of the coefficients that is kept at inference as ``rate``.
    """

    @abc.abstractmethod
    def initialize(self, energy_C: Tensor, decay: float) -> None:
        """Start with nearly everything kept.

        Args:
            energy_C: second moment of each coefficient, falling.
            decay: `gate_decay` of :class:`dynakv.config.DynaKVConfig`, where that has a meaning.
        """

    @abc.abstractmethod
    def open(self) -> None:
        """Keep every coefficient of every token, exactly."""

    @abc.abstractmethod
    def fault_in(self, tensors: Mapping[str, Tensor]) -> str | None:
        """What keeps tensors of the right shapes and dtypes, by their names here, from serving; None where nothing does."""

    @abc.abstractmethod
    def energies(self) -> Tensor:
        """About the second moment of each coefficient, (C,) fp32."""

    @abc.abstractmethod
    def forward(self, coef_BTC: Tensor) -> Tensor:
        """What it finds in tokens, which :meth:`keep` calls and hooks observe: of one number for all, that, (B, T) int64."""

    @abc.abstractmethod
    def keep(self, coef_BTC: Tensor, threshold: float, granularity: int) -> Tensor:
        """How many coefficients of each token are kept at inference, (B, T) int64.

        Args:
            threshold, granularity: of gates that read each token (:func:`lowrank_kv.bases.hard_rank.hard_rank`); the others
                spent them on choosing their rank.
        """

    @abc.abstractmethod
    def reconstruct(
        self, states_BTC: Tensor, basis_CC: Tensor, decoder_CC: Tensor, truncation: Truncation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """States of a training pass, compressed and rebuilt; carries gradients.

        Args:
            states_BTC: joint keys (before rotation) or values.
            basis_CC, decoder_CC: U and V of equations 1 and 3, in the states' dtype.
            truncation: of gates that read each token.

        Returns:
            the rebuilt states, same shape and dtype; the soft rate, a scalar that carries gradients where the gate learns
            what it keeps; the hard rate, a scalar that does not.
        """

    def token_gate(self, basis_CC: Tensor, threshold: float, granularity: int) -> TokenGate | None:
        """What compiled code computes to find how many coefficients a token keeps; None where it cannot.

        Args:
            basis_CC: U in the cache's dtype.
            threshold, granularity: as of :meth:`keep`.
        """
        return None
