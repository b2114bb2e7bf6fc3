"""PuzzleKV: each page of 32 tokens has a singular value decomposition of its own (arXiv 2608.23843).

Nothing is calibrated. A page X of n tokens is held as the leading factors of X = (U Σ) Vᵀ, r (n + C) numbers in the place of
n C. Here a page is of all heads of a layer, of keys before rotation and of values, and all pages of a layer have one rank;
first 4 and latest 16 tokens stay whole.

Shapes: G KV heads, D head dim, C = G·D, N tokens, K pages of n tokens, R rank.
"""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.bases.rank_allocation import uniform_ranks
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.windowed.layer import WindowedLayer
from lowrank_kv.hf.cache.windowed.plan import InitialBasis, Plan, by_columns
from lowrank_kv.hf.cache.windowed.store import TokenStore
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.stores.memory_report import BASES, COEFFICIENTS

from .peer import MakeCache, TextLength, fixed_config, token_share

PAGE_TOKENS = 32


class Pages:
    """Rows of one layer's keys, or values, as factors of their pages.

    Args:
        rank: R of a full page; a shorter one has no more than its tokens.

    Attributes:
        runs: (left_KnR, right_KRC) of pages of equally many tokens, in order.
    """

    def __init__(self, rank: int, dtype: torch.dtype):
        self.rank, self.dtype = rank, dtype
        self.runs: list[tuple[Tensor, Tensor]] = []

    @property
    def length(self) -> int:
        return sum(left_KnR.shape[0] * left_KnR.shape[1] for left_KnR, _ in self.runs)

    def append(self, rows_NC: Tensor) -> None:
        """Factor rows, fp32, into pages of :data:`PAGE_TOKENS` and a last one of what is left."""
        whole = len(rows_NC) // PAGE_TOKENS * PAGE_TOKENS
        for page_KnC in (rows_NC[:whole].unflatten(0, (-1, PAGE_TOKENS)), rows_NC[None, whole:]):
            if page_KnC.numel():
                self.runs.append(self._factors(page_KnC))

    def _factors(self, page_KnC: Tensor) -> tuple[Tensor, Tensor]:
        # Of n tokens the n×n products are much smaller than the page, and their eigenvectors are its left factors.
        left_KnR = torch.linalg.eigh(page_KnC @ page_KnC.mT).eigenvectors.flip(2)[:, :, : self.rank]
        # Contiguous, because a view would keep all factors in memory.
        return left_KnR.to(self.dtype).contiguous(), (left_KnR.mT @ page_KnC).to(self.dtype)

    def rows(self) -> Tensor:
        """All rows, (N, C)."""
        return torch.cat([(left_KnR @ right_KRC).flatten(0, 1) for left_KnR, right_KRC in self.runs])

    def crop(self, length: int) -> None:
        """Keep the first `length` rows."""
        kept, runs = 0, []
        for left_KnR, right_KRC in self.runs:
            pages, tokens, _ = left_KnR.shape
            whole, rest = divmod(max(0, min(length - kept, pages * tokens)), tokens)
            if whole:
                runs.append((left_KnR[:whole].clone(), right_KRC[:whole].clone()))
            if rest:
                runs.append((left_KnR[whole : whole + 1, :rest].clone(), right_KRC[whole : whole + 1].clone()))
            kept += pages * tokens
        self.runs = runs

    def clone(self) -> "Pages":
        twin = copy.copy(self)
        twin.runs = list(self.runs)  # factors are never written in place
        return twin

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        for left_KnR, right_KRC in self.runs:
            yield COEFFICIENTS, left_KnR
            yield BASES, right_KRC


@dataclasses.dataclass(frozen=True)
class PageOperands:
    """What rebuilds pages, in the place of :class:`lowrank_kv.ops.lowrank_attention.Operands`."""

    pages: Pages
    no_rows_G0D: Tensor

    def rebuild(self) -> Tensor:
        """(G, N, D)."""
        if not self.pages.runs:
            return self.no_rows_G0D
        groups, _, head_dim = self.no_rows_G0D.shape
        return self.pages.rows().unflatten(1, (groups, head_dim)).transpose(0, 1)


class PageStore(TokenStore):
    """One sequence's keys, or values, of one layer, in pages; the rank is that of the plan's basis."""

    def __init__(self, initial: InitialBasis, *, dtype: torch.dtype, **settings: Any):
        super().__init__(initial, dtype=dtype, **settings)
        self.coef = Pages(initial.vectors_PWR.shape[2], dtype)

    def operands(self) -> PageOperands:
        return PageOperands(self.coef, self.full.buffer[:, :0])

    def projected(self, rows_PNW: Tensor) -> Tensor:
        return rows_PNW  # pages are factored once they are complete

    def append(self, coef_PNR: Tensor) -> None:
        self.coef.append(coef_PNR[0])


class PuzzleLayer(WindowedLayer):
    """One layer in pages."""

    def new_store(self, initial: InitialBasis, name: str) -> TokenStore:
        grows = self.config.compresses_singly
        return PageStore(initial, head_dim=self.head_dim, dtype=self.dtype, name=name, grows=grows)


def puzzle_maker(
    model: PreTrainedModel, calibration: Calibration | None, share: float, text: TextLength | None = None
) -> MakeCache:
    """Caches in pages, rebuilt for the model's own attention."""
    geometry = geometry_of(model)
    config = fixed_config(
        layout="joint",
        rope="pre",
        update_period=PAGE_TOKENS,
        staggered=False,  # in which the first page after a prompt would be a part of one
        prefill="exact",
        attention="reconstructed",
    )
    rate = token_share(config, geometry, share, text, itemsize=model.dtype.itemsize)
    # r (n + C) numbers take the place of n C; what a rank rounds away goes to the next.
    rate *= geometry.width / (PAGE_TOKENS + geometry.width)
    most = min(PAGE_TOKENS, geometry.width)
    ranks = uniform_ranks([PAGE_TOKENS] * 2 * len(geometry.layers), min(1.0, rate))
    bases = [
        InitialBasis(
            vectors_PWR=by_columns(torch.eye(geometry.width, dtype=torch.float32)[None, :, : min(rank, most)]),
            energy_PR=torch.ones(1, min(rank, most), dtype=torch.float32),
        )
        for rank in ranks
    ]
    layers = dict(zip(geometry.layers, zip(bases[::2], bases[1::2], strict=True), strict=True))
    plan = Plan(config=config, geometry=geometry, layers=layers)
    return lambda: LowRankCache(model, {index: PuzzleLayer(plan, index) for index in geometry.layers})
