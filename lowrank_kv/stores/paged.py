"""Coefficient rows of a batch of sequences in pages, each row with a rank of its own.

The store of :mod:`lowrank_kv.stores.ragged` for a GPU: tokens of equal rank still lie together, but in tiles of N
tokens whose pages may be anywhere in a pool. Nothing is copied as a sequence grows. Everything a kernel needs (lengths,
tables, free pages) is on the device and does not move, as CUDA graphs require, so that the host takes no part in decoding.

Shapes: B batch, T tokens, C width, S tiles a sequence can have, N tokens of a tile, K = C / g granules, Y bytes of
a granule.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lowrank_kv.stores.memory_report import POSITIONS, SCALES
from lowrank_kv.stores.page_pool import PagePool
from lowrank_kv.stores.quantization import SCALE_DTYPE
from lowrank_kv.utils.config import require

NO_TILE = -1


class PagedStore:
    """One layer's keys or values, row t of a sequence keeping its first r_t coefficients (DynaKV section 3.2, equation 2).

    A tile has up to N rows of one rank. Ranks are multiples of the granule g.

    Args:
        batch: B.
        width: C, the most coefficients a row can have; a multiple of g.
        capacity: the most rows a sequence will have.
        pool: where the pages come from.

    Attributes:
        length_B: rows of each sequence, int32.
        tiles_B: tiles of each sequence, int32; tiles beyond it are empty.
        tile_page_BSK: int32 pages of each tile, one for each of its granules.
        tile_granules_BS, tile_rows_BS: int32 granules of each tile's rows, and how many rows it has.
        tile_position_BSN: int32 positions of the rows in their sequence.
        tile_scale_BSN2: bf16 step and least value of each row; None unless coefficients are quantized.
        open_BK: int32 tile that takes the next row of each number of granules, 0 to K; -1 where there is none.
    """

    def __init__(self, batch: int, width: int, *, capacity: int, pool: PagePool):
        require(width % pool.granule == 0, "granule", pool.granule, f"a divisor of the width {width}")
        require(capacity >= 1, "capacity", capacity, "at least 1")
        self.width, self.capacity, self.pool = width, capacity, pool
        self.granules = width // pool.granule
        self._make_tables(batch)

    @torch.inference_mode(False)  # made in that mode, they could not be written outside it
    def _make_tables(self, batch: int) -> None:
        """Make empty tables for `batch` sequences."""
        self.batch, pool = batch, self.pool
        # Every number of granules may have one tile that is not full.
        slots = -(-self.capacity // pool.tokens) + self.granules + 1

        def table(*shape: int, fill: int = 0) -> Tensor:
            return torch.full((batch, *shape), fill, dtype=torch.int32, device=pool.device)

        self.length_B, self.tiles_B = table(), table()
        self.tile_page_BSK = table(slots, self.granules)
        self.tile_granules_BS, self.tile_rows_BS = table(slots), table(slots)
        self.tile_position_BSN = table(slots, pool.tokens)
        self.tile_scale_BSN2 = None
        if pool.quantization is not None:
            self.tile_scale_BSN2 = torch.zeros(batch, slots, pool.tokens, 2, dtype=SCALE_DTYPE, device=pool.device)
        self.open_BK = table(self.granules + 1, fill=NO_TILE)

    @property
    def slots(self) -> int:
        """S, tiles a sequence can have."""
        return self.tile_page_BSK.shape[1]

    # -- writing --------------------------------------------------------------------------------------------------

    def append(self, coef_BTC: Tensor, rank_BT: Tensor) -> None:
        """Add T rows to each sequence; only the first ``rank_BT`` entries of a row are read and kept.

        Waits for the device. :mod:`lowrank_kv.ops.gated_append` appends a single token of each sequence without waiting.

        Args:
            coef_BTC: coefficients, any floating dtype.
            rank_BT: integer ranks in 0..C, multiples of g.

        Raises:
            UserError: a rank is not a multiple of g, or there are more rows than `capacity`, or too few free pages.
        """
        granules_BT = rank_BT.div(self.pool.granule, rounding_mode="floor")
        is_valid_BT = (granules_BT * self.pool.granule == rank_BT) & (granules_BT >= 0) & (granules_BT <= self.granules)
        require(
            bool(is_valid_BT.all()),
            "rank_BT",
            rank_BT.unique().tolist(),
            f"multiples of {self.pool.granule} from 0 to {self.width}: use a granularity that is one",
        )
        present_BT = torch.ones_like(rank_BT, dtype=torch.bool)
        self._place(*self._encoded(coef_BTC.detach(), granules_BT), granules_BT, present_BT)

    def crop(self, length: int | Tensor) -> None:
        """Keep the first `length` rows of each sequence, an int or (B,). Emptied tiles give back their pages."""
        length_B = torch.as_tensor(length, device=self.pool.device).expand(self.batch)
        require(
            bool(((length_B >= 0) & (length_B <= self.length_B)).all()),
            "length",
            length_B.tolist(),
            f"in 0..length, which is {self.length_B.tolist()}",
        )
        # Positions rise within a tile, so the dropped rows are its last.
        row_N = torch.arange(self.pool.tokens, device=self.pool.device)
        used_BSN = row_N < self.tile_rows_BS[..., None]
        kept_BS = (used_BSN & (self.tile_position_BSN < length_B[:, None, None])).sum(dim=-1).to(torch.int32)
        emptied_BS = (self.tile_rows_BS > 0) & (kept_BS == 0)
        self._give_back(emptied_BS)
        self.tile_rows_BS.copy_(kept_BS)
        self.tile_granules_BS.masked_fill_(emptied_BS, 0)
        # Tiles that keep rows move to the front, in their order.
        order_BS = (kept_BS == 0).to(torch.int8).argsort(dim=1, stable=True)
        for table in (
            self.tile_page_BSK,
            self.tile_granules_BS,
            self.tile_rows_BS,
            self.tile_position_BSN,
            self.tile_scale_BSN2,
        ):
            if table is not None:
                table.copy_(table.gather(1, order_BS.view(*order_BS.shape, *[1] * (table.dim() - 2)).expand_as(table)))
        self.tiles_B.copy_((kept_BS > 0).sum(dim=1))
        self.length_B.copy_(length_B)
        self._find_open()

    def select(self, index_B: Tensor) -> None:
        """Replace sequence b by a copy of sequence ``index_B[b]``, as beam search asks; the batch size may change.

        Raises:
            UserError: too few pages are free; nothing has moved.
        """
        raw, scale, granules_BT, present_BT = self._rows()
        pages_B = self.pages_of_sequences()
        self.pool.check_free(int(pages_B[index_B].sum()), given_back=int(pages_B.sum()))
        self.clear()
        if len(index_B) != self.batch:
            self._make_tables(len(index_B))
        scale = None if scale is None else scale[index_B]
        self._place(raw[index_B], scale, granules_BT[index_B], present_BT[index_B])

    def clear(self) -> None:
        """Forget all rows and give back their pages."""
        self._give_back(self.tile_rows_BS > 0)
        for table in (self.length_B, self.tiles_B, self.tile_granules_BS, self.tile_rows_BS):
            table.zero_()
        self.open_BK.fill_(NO_TILE)

    def pages_of_sequences(self) -> Tensor:
        """How many pages each sequence has, (B,) on the device."""
        return torch.where(self.tile_rows_BS > 0, self.tile_granules_BS, 0).sum(dim=1)

    # -- reading --------------------------------------------------------------------------------------------------

    def dense(self) -> Tensor:
        """All rows as (B, T, C), T the longest sequence's, zero beyond each row's rank and each sequence's length."""
        raw, scale, granules_BT, present_BT = self._rows()
        column_C = torch.arange(self.width, device=self.pool.device)
        kept_BTC = (column_C < self.pool.granule * granules_BT[..., None]) & present_BT[..., None]
        return self.pool.unpack(raw, scale) * kept_BTC

    def ranks(self) -> Tensor:
        """The rank of every row, (B, T) int64, 0 beyond a sequence's length."""
        return self._rows()[2].long() * self.pool.granule

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of the tables; the pages belong to the pool."""
        for table in (self.length_B, self.tiles_B, self.tile_page_BSK, self.tile_granules_BS, self.tile_rows_BS):
            yield POSITIONS, table
        yield POSITIONS, self.tile_position_BSN
        yield POSITIONS, self.open_BK
        if self.tile_scale_BSN2 is not None:
            yield SCALES, self.tile_scale_BSN2

    # -- within ---------------------------------------------------------------------------------------------------

    def _encoded(self, coef_BTC: Tensor, granules_BT: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows as they lie in pages, (B, T, K, Y), and their scales, (B, T, 2) or None."""
        column_C = torch.arange(self.width, device=coef_BTC.device)
        kept_BTC = column_C < self.pool.granule * granules_BT[..., None]
        if self.pool.quantization is None:
            return self.pool.pack(torch.where(kept_BTC, coef_BTC, 0).to(self.pool.dtype)), None
        # A row's range is that of the coefficients it keeps, so that rows are rounded a rank at a time.
        code_BTC = torch.zeros(coef_BTC.shape, dtype=torch.uint8, device=coef_BTC.device)
        scale_BT2 = torch.zeros(*coef_BTC.shape[:2], 2, dtype=SCALE_DTYPE, device=coef_BTC.device)
        for granules in range(1, self.granules + 1):
            row, rank = torch.nonzero(granules_BT == granules, as_tuple=True), granules * self.pool.granule
            if len(row[0]):
                code_XR, scale_BT2[row] = self.pool.quantization.levels(coef_BTC[row][:, :rank])
                code_BTC[row] = torch.nn.functional.pad(code_XR, (0, self.width - rank))
        return self.pool.pack(code_BTC), scale_BT2

    def _place(self, raw_BTKY: Tensor, scale_BT2: Tensor | None, granules_BT: Tensor, present_BT: Tensor) -> None:
        """Find each row that is present a tile and a place in it, take the pages that are missing, and write."""
        size, device = self.pool.tokens, self.pool.device
        granules_BT = granules_BT.long()
        position_BT = self.length_B[:, None] + present_BT.cumsum(dim=1) - 1
        count_B = present_BT.sum(dim=1)
        longest = int((self.length_B + count_B).max())
        require(
            longest <= self.capacity, "capacity", self.capacity, f"at least {longest}, the rows of the longest sequence"
        )
        # How many rows of the same rank a row follows, in its open tile and beyond.
        is_one_BTK = torch.nn.functional.one_hot(granules_BT, self.granules + 1) * present_BT[..., None]
        before_BT = (is_one_BTK.cumsum(dim=1) - is_one_BTK).gather(2, granules_BT[..., None]).squeeze(2)
        open_BK = self.open_BK.long()
        filled_BK = self.tile_rows_BS.long().gather(1, open_BK.clamp(min=0))
        room_BK = torch.where(open_BK == NO_TILE, 0, size - filled_BK)
        fresh_BK = (is_one_BTK.sum(dim=1) - room_BK + size - 1).clamp(min=0).div(size, rounding_mode="floor")
        first_BK = self.tiles_B[:, None] + fresh_BK.cumsum(dim=1) - fresh_BK

        over_BT = before_BT - room_BK.gather(1, granules_BT)
        is_fresh_BT = over_BT >= 0
        tile_BT = torch.where(
            is_fresh_BT,
            first_BK.gather(1, granules_BT) + over_BT.div(size, rounding_mode="floor"),
            open_BK.gather(1, granules_BT),
        )
        row_BT = over_BT % size

        b, t = torch.nonzero(present_BT & is_fresh_BT & (row_BT == 0), as_tuple=True)  # rows that begin a tile
        granules_X = granules_BT[b, t]
        has_page_XK = torch.arange(self.granules, device=device) < granules_X[:, None]
        pages = int(has_page_XK.sum())
        self.pool.reserve(pages)
        page_XK = torch.zeros(has_page_XK.shape, dtype=torch.long, device=device)
        page_XK[has_page_XK] = self.pool.take(pages)
        self.tile_page_BSK[b, tile_BT[b, t]] = page_XK.to(torch.int32)
        self.tile_granules_BS[b, tile_BT[b, t]] = granules_X.to(torch.int32)

        b, t = torch.nonzero(present_BT, as_tuple=True)
        tile_X, row_X = tile_BT[b, t], row_BT[b, t]
        self.tile_position_BSN[b, tile_X, row_X] = position_BT[b, t].to(torch.int32)
        self.tile_rows_BS.index_put_((b, tile_X), torch.ones_like(b, dtype=torch.int32), accumulate=True)
        if scale_BT2 is not None:
            self.tile_scale_BSN2[b, tile_X, row_X] = scale_BT2[b, t]
        for granule in range(self.granules):
            b, t = torch.nonzero(present_BT & (granules_BT > granule), as_tuple=True)
            page_X = self.tile_page_BSK[b, tile_BT[b, t], granule].long()
            self.pool.page_PNY[page_X, row_BT[b, t]] = raw_BTKY[b, t, granule]

        self.open_BK.copy_(torch.where(fresh_BK > 0, first_BK + fresh_BK - 1, open_BK))
        self.tiles_B += fresh_BK.sum(dim=1)
        self.length_B += count_B

    def _rows(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """All rows by place: raw (B, T, K, Y), scales (B, T, 2) or None, granules (B, T), and which are there (B, T)."""
        longest, device = int(self.length_B.max()), self.pool.device
        row_N = torch.arange(self.pool.tokens, device=device)
        b, s, n = torch.nonzero(row_N < self.tile_rows_BS[..., None], as_tuple=True)
        t, granules_X = self.tile_position_BSN[b, s, n].long(), self.tile_granules_BS[b, s]
        raw = self.pool.page_PNY.new_zeros(self.batch, longest, self.granules, self.pool.page_PNY.shape[2])
        for granule in range(self.granules):
            [x] = torch.nonzero(granules_X > granule, as_tuple=True)
            page_X = self.tile_page_BSK[b[x], s[x], granule].long()
            raw[b[x], t[x], granule] = self.pool.page_PNY[page_X, n[x]]
        granules_BT = torch.zeros(self.batch, longest, dtype=torch.int32, device=device)
        granules_BT[b, t] = granules_X
        scale = None
        if self.tile_scale_BSN2 is not None:
            scale = torch.zeros(self.batch, longest, 2, dtype=SCALE_DTYPE, device=device)
            scale[b, t] = self.tile_scale_BSN2[b, s, n]
        present_BT = torch.arange(longest, device=device) < self.length_B[:, None]
        return raw, scale, granules_BT, present_BT

    def _give_back(self, tile_BS: Tensor) -> None:
        granule_K = torch.arange(self.granules, device=self.pool.device)
        self.pool.give_back(self.tile_page_BSK[tile_BS[..., None] & (granule_K < self.tile_granules_BS[..., None])])

    def _find_open(self) -> None:
        """The newest tile of each rank, which alone may have room."""
        # A crop empties a rank's tiles from the newest on; of those that stay, the one with the last first row is open.
        is_used_BS = self.tile_rows_BS > 0
        first_BS = self.tile_position_BSN[..., 0].masked_fill(~is_used_BS, NO_TILE)
        for granules in range(self.granules + 1):
            first_of_BS = first_BS.masked_fill(self.tile_granules_BS != granules, NO_TILE)
            last_B, tile_B = first_of_BS.max(dim=1)
            self.open_BK[:, granules] = torch.where(last_B == NO_TILE, NO_TILE, tile_B.to(torch.int32))
