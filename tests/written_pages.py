"""Sequences in a server's pages, as compiled code and the plain form write them; pages of several sequences are mixed."""

import torch
from paged_rows import HEAD_DIM, HEADS, coefficients, ranks
from torch import Tensor

from lowrank_kv.ops.native.pages import NewTokens, Pages
from lowrank_kv.stores.arena import PageLayout, read_rows, write_rows

MOST = 512  # tokens of a sequence


class Written:
    """Sequences in pages that other sequences' pages stand between, and what was written of each.

    Args:
        first_page: the number of the first page; those before it are never touched, and take no memory.
    """

    def __init__(
        self,
        layout: PageLayout,
        lengths: list[int],
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        *,
        head_dim: int = HEAD_DIM,
        first_page: int = 0,
    ):
        self.layout, self.lengths, self.dtype, self.head_dim = layout, lengths, dtype, head_dim
        self.block, self.sinks = layout.keys.block_size, layout.keys.num_sinks
        count = max(-(-length // self.block) for length in lengths)
        generator = torch.Generator().manual_seed(seed)
        order_X = first_page + torch.randperm(len(lengths) * count, generator=generator).int()
        self.page_BP = order_X.view(len(lengths), count)
        # Pages of a server lie further apart than they are long.
        memory = torch.empty(first_page + len(lengths) * count, layout.page_bytes + 48, dtype=torch.uint8)
        memory[first_page:] = 0xA5
        self.page_XY = memory[:, : layout.page_bytes]
        self.coef_SBTC = [[coefficients(n, seed + 7 * b + side) for b, n in enumerate(lengths)] for side in range(2)]
        rows = (layout.keys.row_format, layout.values.row_format)
        self.rank_SBT = [
            [ranks(each, n, seed + 3 * b + i) for b, n in enumerate(lengths)] for i, each in enumerate(rows)
        ]
        self.state_SBTGD = [
            [torch.randn(n, HEADS, head_dim, generator=generator).to(dtype) for n in lengths] for _ in range(2)
        ]
        self.pages = Pages(self.page_XY, layout, num_kv_heads=HEADS, head_dim=head_dim, dtype=dtype, most_tokens=MOST)

    def step(
        self, spans: list[tuple[int, int, int]]
    ) -> tuple[NewTokens, tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
        """Tokens of some sequences, each (sequence, first, end): new ones, their coefficients, and ranks where rows have
        some."""
        position_T = torch.cat([torch.arange(first, end) for _, first, end in spans])
        slot_T = torch.cat(
            [
                self.page_BP[b].long()[torch.arange(first, end) // self.block] * self.block
                + torch.arange(first, end) % self.block
                for b, first, end in spans
            ]
        )

        def of_sides(side_SBT: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
            return tuple(torch.cat([side[b][first:end] for b, first, end in spans]) for side in side_SBT)

        ranks = None if self.rank_SBT[0][0] is None else of_sides(self.rank_SBT)
        return NewTokens(*of_sides(self.state_SBTGD), position_T, slot_T), of_sides(self.coef_SBTC), ranks

    def write(self, spans: list[tuple[int, int, int]]) -> int:
        """The same into the pages, in one call; how many rows were cut."""
        new, (key_TC, value_TC), ranks = self.step(spans)
        return self.pages.write(new, key_TC, value_TC, ranks)

    def write_all(self) -> int:
        return self.write([(b, 0, length) for b, length in enumerate(self.lengths)])

    def plain(self) -> tuple[Tensor, int]:
        """The pages as the plain form writes them, and how many rows it cut."""
        page_XY, cut = torch.full_like(self.page_XY, 0xA5), 0
        for which, side in enumerate((self.layout.keys, self.layout.values)):
            for b, length in enumerate(self.lengths):
                for p, start in enumerate(range(0, length, self.block)):
                    coef_TC = self.coef_SBTC[which][b][start : start + self.block]
                    page_Y, skipped = page_XY[self.page_BP[b, p]], self.sinks * (p == 0)
                    rank_T = self.rank_SBT[which][b]
                    rank_T = None if rank_T is None else rank_T[start : start + self.block][skipped:]
                    cut += write_rows(side, page_Y, 0, coef_TC[skipped:], is_first=p == 0, rank_N=rank_T)
                    if p == 0:
                        sink_Y = self.state_SBTGD[which][b][: self.sinks].contiguous().view(-1).view(torch.uint8)
                        page_Y[side.sinks : side.sinks + len(sink_Y)] = sink_Y
        return page_XY, cut

    def rows(self, which: int, b: int, count: int) -> Tensor:
        """The first rows of a sequence, read by the plain form."""
        side, found, left = (self.layout.keys, self.layout.values)[which], [], count
        for p in range(self.page_BP.shape[1]):
            n = min(left, side.row_capacity(is_first=p == 0))
            found.append(read_rows(side, self.page_XY[self.page_BP[b, p]], n))
            left -= n
        return torch.cat(found)
