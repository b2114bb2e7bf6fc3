"""The rows of coefficients of one sequence in one layer: of keys and of values apart, or shared by both and by other layers.

A token's keys and values, in one layer and in the next, come of one residual stream and have much in common, which rows of
their own would hold again and again. A row of them all says it once: [key, value, key, value, …] in one loss-weighted basis,
as a latent of multi-head latent attention is of one layer's key and value (DeepSeek-V2, arXiv 2405.04434, section 2.1).
Attention pays for it: in each layer it rebuilds keys, and sums values, from all of a row.

Shapes: P parts, N tokens, W width of a part, R rank.
"""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from lowrank_kv.hf.cache.windowed.store import TokenStore
from lowrank_kv.stores.coefficients import Coefficients


class Rows(Protocol):
    """Where the coefficients of a sequence's keys and values are.

    Attributes:
        key, value: what holds the tokens at full rank, and reads the rows.
    """

    key: TokenStore
    value: TokenStore

    def crop(self, length: int) -> None:
        """Forget the rows from `length` on."""

    def only(self, row_PN: Tensor) -> tuple[Coefficients, Coefficients]:
        """What holds only these rows of keys, and of values."""

    def forget_text(self) -> None:
        """All tokens but the first are gone: forget what was found in them."""
        self.key.forget_text()
        self.value.forget_text()

    def clone(self) -> "Rows":
        """An independent copy."""

    def tensors_by_kind(self, num_pinned: int) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of everything held; see :meth:`TokenStore.tensors_by_kind`."""


class SeparateRows(Rows):
    """Rows of keys and rows of values, which each store holds by itself."""

    def __init__(self, key: TokenStore, value: TokenStore):
        self.key, self.value = key, value

    def follow(self, key_PNW: Tensor, value_PNW: Tensor, *, is_prompt: bool) -> tuple[Tensor, Tensor]:
        """See tokens that are about to be compressed (:meth:`TokenStore.follow`). Returns their rows, (P, N, R) each."""
        return self.key.follow(key_PNW, is_prompt=is_prompt), self.value.follow(value_PNW, is_prompt=is_prompt)

    def crop(self, length: int) -> None:
        self.key.crop(length)
        self.value.crop(length)

    def only(self, row_PN: Tensor) -> tuple[Coefficients, Coefficients]:
        return self.key.coef.kept(row_PN), self.value.coef.kept(row_PN)

    def clone(self) -> "SeparateRows":
        return SeparateRows(self.key.clone(), self.value.clone())

    def tensors_by_kind(self, num_pinned: int) -> Iterator[tuple[str, Tensor]]:
        yield from self.key.tensors_by_kind(num_pinned)
        yield from self.value.tensors_by_kind(num_pinned)


class JointRows(Rows):
    """Rows of keys and values together. The keys' store of one layer holds and writes them; all others read them, each by
    its own decoder, once they are told where they are (:meth:`read`).

    Args:
        holds: whether this layer's store of keys holds the rows.
    """

    def __init__(self, key: TokenStore, value: TokenStore, *, holds: bool):
        self.key, self.value, self.holds = key, value, holds
        if holds:
            self.read(key)

    def read(self, holder: TokenStore) -> None:
        """The rows are those that this store holds."""
        if not self.holds:
            self.key.read_rows_of(holder)
        self.value.read_rows_of(holder)

    def coefficients(self, key_PNW: Tensor, value_PNW: Tensor) -> Tensor:
        """What this layer's states add to the rows of tokens that are about to be compressed, (P, N, R)."""
        self.key.forget_operands()
        self.value.forget_operands()
        return self.key.projected(key_PNW) + self.value.projected(value_PNW)

    def crop(self, length: int) -> None:
        if self.holds:
            self.key.crop(length)

    def only(self, row_PN: Tensor) -> tuple[Coefficients, Coefficients]:
        kept = self.key.coef.kept(row_PN)
        return kept, kept

    def clone(self) -> "JointRows":
        key = self.key.clone() if self.holds else self.key.clone_full_rank()
        return JointRows(key, self.value.clone_full_rank(), holds=self.holds)

    def tensors_by_kind(self, num_pinned: int) -> Iterator[tuple[str, Tensor]]:
        yield from self.key.tensors_by_kind(num_pinned) if self.holds else self.key.full_rank_by_kind(num_pinned)
        yield from self.value.full_rank_by_kind(num_pinned)
