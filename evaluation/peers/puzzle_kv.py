"""PuzzleKV: each page of 32 tokens has a singular value decomposition of its own (arXiv 2608.23843).

Nothing is calibrated. A page X of n tokens is held as the leading factors of X = (U Σ) Vᵀ, r (n + C) numbers in the place of
n C. Here a page is of all heads of a layer, of keys before rotation and of values, and all pages of a layer have one rank;
first 4 and latest 16 tokens stay whole.

Shapes: G KV heads, D head dim, C = G·D, N tokens, K pages of n tokens, R rank.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.bases.rank_allocation import uniform_ranks
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.windowed.layer import Side, WindowedLayer
from lowrank_kv.hf.cache.windowed.plan import InitialBasis, Plan
from lowrank_kv.hf.cache.windowed.store import TokenStore
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.stores.memory_report import BASES, COEFFICIENTS

from .peer import MakeCache, TextLength, fixed_config, token_share
from .token_pages import PAGE_TOKENS, PagedRows, PagedStore


class Pages(PagedRows):
    """Rows (…, N, C) as factors of their pages.

    Args:
        rank: R of a full page; a shorter one has no more than its tokens.
    """

    def __init__(self, rank: int, dtype: torch.dtype):
        super().__init__()
        self.rank, self.dtype = rank, dtype

    def encoded(self, page_KnC: Tensor) -> tuple[Tensor, Tensor]:
        """Factors (…, K, n, R) and (…, K, R, C)."""
        # Of n tokens the n×n products are much smaller than the page, and their eigenvectors are its left factors.
        left_KnR = torch.linalg.eigh(page_KnC @ page_KnC.mT).eigenvectors.flip(-1)[..., : self.rank]
        # Contiguous, because a view would keep all factors in memory.
        return left_KnR.to(self.dtype).contiguous(), (left_KnR.mT @ page_KnC).to(self.dtype)

    def decoded(self, run: tuple[Tensor, Tensor]) -> Tensor:
        left_KnR, right_KRC = run
        return left_KnR @ right_KRC

    def part_of(self, run: tuple[Tensor, Tensor], pages: slice, rows: int) -> tuple[Tensor, Tensor]:
        left_KnR, right_KRC = run
        return left_KnR[..., pages, :rows, :].clone(), right_KRC[..., pages, :, :].clone()

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        for left_KnR, right_KRC in self.runs:
            yield COEFFICIENTS, left_KnR
            yield BASES, right_KRC


class PuzzleLayer(WindowedLayer):
    """One layer in pages."""

    def new_store(self, initial: InitialBasis, side: Side) -> TokenStore:
        pages = Pages(initial.vectors_PWR.shape[2], self.dtype)  # the rank is that of the plan's basis
        return PagedStore(initial, pages, leaves_room=self.config.compresses_singly, **self.store_settings(side))


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
    rate = token_share(config, model, share, text)
    # r (n + C) numbers take the place of n C; what a rank rounds away goes to the next.
    rate *= geometry.width / (PAGE_TOKENS + geometry.width)
    most = min(PAGE_TOKENS, geometry.width)
    ranks = uniform_ranks([PAGE_TOKENS] * 2 * len(geometry.layers), min(1.0, rate))
    bases = [InitialBasis.identity(1, geometry.width, rank=min(rank, most), is_compressed=True) for rank in ranks]
    plan = Plan.of_bases(config, geometry, bases)
    return lambda: LowRankCache(model, {index: PuzzleLayer(plan, index) for index in geometry.layers})
