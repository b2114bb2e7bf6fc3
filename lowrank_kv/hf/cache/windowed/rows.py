"""The rows of coefficients of one sequence in one layer: of keys and of values apart, or one row of a token's key and value.

A token's key and value come from one hidden state, and have much in common, which rows of their own would hold twice. A row
of both says it once: [key, value] in one loss-weighted basis, as a latent of multi-head latent attention is of both
(DeepSeek-V2, arXiv 2405.04434, section 2.1). Attention pays for it: it rebuilds keys, and sums values, from all of a row.

Shapes: G KV heads, D head dim, P parts, N tokens, W width of a part, R rank.
"""

import copy
from collections.abc import Iterator

from torch import Tensor

from lowrank_kv.hf.cache.windowed.store import TokenStore
from lowrank_kv.stores.coefficients import Coefficients


class SeparateRows:
    """Rows of keys and rows of values.

    Attributes:
        key, value: the stores.
    """

    def __init__(self, key: TokenStore, value: TokenStore):
        self.key, self.value = key, value

    def follow(self, key_PNW: Tensor, value_PNW: Tensor, *, is_prompt: bool) -> tuple[Tensor, ...]:
        """See tokens that are about to be compressed (:meth:`TokenStore.follow`). Returns their rows, (P, N, R) each."""
        return self.key.follow(key_PNW, is_prompt=is_prompt), self.value.follow(value_PNW, is_prompt=is_prompt)

    def append(self, rows: tuple[Tensor, ...]) -> None:
        """Append rows as :meth:`follow` returned them."""
        for store, row_PNR in zip((self.key, self.value), rows, strict=True):
            store.append(row_PNR)

    def crop(self, length: int) -> None:
        """Forget the rows from `length` on."""
        self.key.crop(length)
        self.value.crop(length)

    def only(self, row_PN: Tensor) -> tuple[Coefficients, Coefficients]:
        """What holds only these rows of keys, and of values."""
        return self.key.coef.kept(row_PN), self.value.coef.kept(row_PN)

    def forget_text(self) -> None:
        """All tokens but the first are gone: forget what was found in them."""
        self.key.forget_text()
        self.value.forget_text()

    def clone(self) -> "SeparateRows":
        """An independent copy."""
        return type(self)(self.key.clone(), self.value.clone())

    def tensors_by_kind(self, num_pinned: int) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of everything held; see :meth:`TokenStore.tensors_by_kind`."""
        yield from self.key.tensors_by_kind(num_pinned)
        yield from self.value.tensors_by_kind(num_pinned)


class JointRows(SeparateRows):
    """Rows of keys and values together, which the keys' store holds and writes and both read, each by its own decoder."""

    def __init__(self, key: TokenStore, value: TokenStore):
        super().__init__(key, value)
        value.read_rows_of(key)

    def follow(self, key_PNW: Tensor, value_PNW: Tensor, *, is_prompt: bool) -> tuple[Tensor, ...]:
        self.value.forget_operands()
        self.key.forget_operands()
        row_PNR = self.key.projected(key_PNW) + self.value.projected(value_PNW)
        self.key.look_at(row_PNR)
        self.value.read_rows_of(self.key)
        return (row_PNR,)

    def append(self, rows: tuple[Tensor, ...]) -> None:
        [row_PNR] = rows
        self.key.append(row_PNR)

    def crop(self, length: int) -> None:
        self.key.crop(length)

    def only(self, row_PN: Tensor) -> tuple[Coefficients, Coefficients]:
        kept = self.key.coef.kept(row_PN)
        return kept, kept

    def forget_text(self) -> None:
        self.key.forget_text()
        self.value.read_rows_of(self.key)

    def clone(self) -> "JointRows":
        value = copy.copy(self.value)
        value.full = self.value.full.clone()
        value.forget_operands()
        return JointRows(self.key.clone(), value)

    def tensors_by_kind(self, num_pinned: int) -> Iterator[tuple[str, Tensor]]:
        yield from self.key.tensors_by_kind(num_pinned)
        yield from self.value.full_rank_by_kind(num_pinned)
