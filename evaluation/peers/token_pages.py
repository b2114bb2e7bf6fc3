"""Tokens in pages that have numbers of their own, such as factors or ranges, in the place of coefficients in a basis.

Shapes: P parts of a row, of W numbers each, N tokens, K pages of n tokens, G KV heads, D head dim.
"""

import abc
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lowrank_kv.hf.cache.windowed.plan import InitialBasis
from lowrank_kv.hf.cache.windowed.store import TokenStore

PAGE_TOKENS = 32


class PagedRows(abc.ABC):
    """Rows (…, N, W) of one layer's keys, or values.

    Attributes:
        runs: pages of equally many tokens, in order. The first tensor of each is (…, K, n, any).
    """

    def __init__(self):
        self.runs: list[Sequence[Tensor]] = []

    @property
    def length(self) -> int:
        return sum(run[0].shape[-3] * run[0].shape[-2] for run in self.runs)

    def append(self, rows_NW: Tensor) -> None:
        """Encode rows, fp32, in pages of :data:`PAGE_TOKENS` and a last one of what is left."""
        whole = rows_NW.shape[-2] // PAGE_TOKENS * PAGE_TOKENS
        first_KnW = rows_NW[..., :whole, :].unflatten(-2, (-1, PAGE_TOKENS))
        for page_KnW in (first_KnW, rows_NW[..., whole:, :].unsqueeze(-3)):
            if page_KnW.numel():
                self.runs.append(self.encoded(page_KnW))

    def rows(self) -> Tensor:
        """All rows, of which there is at least one."""
        return torch.cat([self.decoded(run).flatten(-3, -2) for run in self.runs], dim=-2)

    def crop(self, length: int) -> None:
        """Keep the first `length` rows."""
        kept, runs = 0, []
        for run in self.runs:
            pages, tokens = run[0].shape[-3:-1]
            whole, rest = divmod(max(0, min(length - kept, pages * tokens)), tokens)
            for part, rows in ((slice(0, whole), tokens), (slice(whole, whole + 1), rest)):
                if part.stop > part.start and rows:
                    runs.append(self.part_of(run, part, rows))
            kept += pages * tokens
        self.runs = runs

    def clone(self) -> "PagedRows":
        twin = copy.copy(self)
        twin.runs = list(self.runs)  # pages are never written in place
        return twin

    @abc.abstractmethod
    def encoded(self, page_KnW: Tensor) -> Sequence[Tensor]:
        """Pages (…, K, n, W) as they are held."""

    @abc.abstractmethod
    def decoded(self, run: Sequence[Tensor]) -> Tensor:
        """Pages (…, K, n, W) from what is held, in the model's dtype."""

    @abc.abstractmethod
    def part_of(self, run: Sequence[Tensor], pages: slice, rows: int) -> Sequence[Tensor]:
        """The first rows of some pages, in copies that hold no more than they show."""

    @abc.abstractmethod
    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of everything held."""


@dataclasses.dataclass(frozen=True)
class PagedOperands:
    """What rebuilds pages, in the place of :class:`lowrank_kv.ops.lowrank_attention.Operands`."""

    paged: PagedRows
    no_rows_G0D: Tensor

    def rebuild(self) -> Tensor:
        """(G, N, D)."""
        if not self.paged.runs:
            return self.no_rows_G0D
        # Parts are single heads, or one part is all of them.
        return self.paged.rows().unflatten(2, (-1, self.no_rows_G0D.shape[2])).transpose(1, 2).flatten(0, 1)


class PagedStore(TokenStore):
    """One sequence's keys, or values, of one layer, in pages."""

    def __init__(self, initial: InitialBasis, paged: PagedRows, **settings: Any):
        super().__init__(initial, **settings)
        self.coef = paged

    def operands(self) -> PagedOperands:
        return PagedOperands(self.coef, self.full.buffer[:, :0])

    def projected(self, rows_PNW: Tensor) -> Tensor:
        return rows_PNW  # pages are encoded once they are complete

    def append(self, coef_PNR: Tensor) -> None:
        self.coef.append(coef_PNR)
