"""Pages of equal size that each hold a block of a sequence's tokens as packed coefficients: what a paged server can share.

A page has a part for a layer's keys and one for its values:

    levels of rows | starts of rows | rows, one behind another … | exact states of the first tokens

The first tokens of a sequence, which are read by all others, may stay exact; only a sequence's first page holds some, and in
other pages rows may take their room. Where tokens have classes, or ranks of their own, rows differ in size: these are their
levels. A row is then of the level that its token asks for, or of the next cheaper one that leaves room for the cheapest
rows of all tokens still to come. This depends on nothing but the tokens before it in its page. So a page has the same bytes
however its tokens were divided into calls, a row that is written again takes all later ones with it, and sequences that
begin alike may share pages.

This file says where everything is, and writes and reads it in plain torch. A server calls
`lowrank_kv/ops/native/pages.py` on a CPU, and on a GPU the kernels of `lowrank_kv/ops/arena_append/` and `arena_attention/`.

Shapes: N rows of one page, C joint width, R coefficients that are kept at most, Y bytes of a page, F exact tokens.
"""

import dataclasses
import functools
import math

import torch
from torch import Tensor

from lowrank_kv.stores.page_rows import PageRows, RowFormat, page_rows
from lowrank_kv.stores.rows_of_classes import ROWS_BETWEEN_MARKS
from lowrank_kv.stores.token_plans import MARK_BYTES
from lowrank_kv.utils.config import require

_ALIGNMENT = 16  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideLayout:
    """Where a layer's keys, or its values, are in a page; places are bytes from the page's start.

    Attributes:
        row_format: how rows are packed: by one plan, by that of their class, or as numbers of one width.
        block_size: tokens of a page.
        num_sinks: first tokens of a sequence, which stay exact.
        packed: where the levels of rows are.
        marks: where the starts of every 32nd row are, int32, counted from the first row.
        first_row: where the first row is.
        sinks: where exact states are in a sequence's first page, (F, C) in the model's dtype.
        end: what follows belongs to something else.
    """

    row_format: RowFormat
    block_size: int
    num_sinks: int
    packed: int
    marks: int
    first_row: int
    sinks: int
    end: int

    @classmethod
    def after(
        cls,
        start: int,
        row_format: RowFormat,
        *,
        block_size: int,
        num_sinks: int,
        sink_bytes: int,
        margin: float,
    ) -> "SideLayout":
        """The part of a page that begins at byte `start`.

        Args:
            sink_bytes: of a token's exact state.
            margin: room for rows beyond their mean size over the calibration's tokens, as a share of it.
        """
        rows = page_rows(row_format)
        packed = _aligned(start)
        marks = packed + _aligned(rows.noted_bytes(block_size), MARK_BYTES)
        first_row = marks + -(-block_size // ROWS_BETWEEN_MARKS) * MARK_BYTES * rows.differ

        def room(tokens: int) -> int:
            mean = rows.mean_bytes * (1 + margin * rows.differ)
            return max(math.ceil(tokens * mean), tokens * rows.size(rows.least))

        sinks = _aligned(first_row + room(block_size - num_sinks))
        end = max(sinks + num_sinks * sink_bytes, first_row + room(block_size))
        return cls(
            row_format=row_format,
            block_size=block_size,
            num_sinks=num_sinks,
            packed=packed,
            marks=marks,
            first_row=first_row,
            sinks=sinks,
            end=end,
        )

    @functools.cached_property
    def rows(self) -> PageRows:
        """What rows take."""
        return page_rows(self.row_format)

    def row_capacity(self, *, is_first: bool) -> int:
        """Rows of a page, which in a sequence's first one follow its sinks."""
        return self.block_size - self.num_sinks * is_first

    def row_room(self, *, is_first: bool) -> int:
        """Bytes for all rows of a page."""
        return (self.sinks if is_first else self.end) - self.first_row


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageLayout:
    """A page of one layer.

    Attributes:
        keys, values: its parts.
        page_bytes: a multiple of the block size, so that a server can count it by tokens.
    """

    keys: SideLayout
    values: SideLayout
    page_bytes: int

    @classmethod
    def of(
        cls,
        keys: RowFormat,
        values: RowFormat,
        *,
        block_size: int,
        num_sinks: int,
        sink_bytes: int,
        margin: float = 0.0,
    ) -> "PageLayout":
        """The layout for these plans; arguments as of :meth:`SideLayout.after`.

        Raises:
            UserError: blocks have no room for rows, or the margin is negative.
        """
        require(0 <= num_sinks < block_size, "num_sink_tokens", num_sinks, f"below the block size, {block_size} tokens")
        require(margin >= 0, "page_margin", margin, "zero or positive; 0.03 leaves room for 3 % more")
        shared = {"block_size": block_size, "num_sinks": num_sinks, "sink_bytes": sink_bytes, "margin": margin}
        key_side = SideLayout.after(0, keys, **shared)
        value_side = SideLayout.after(key_side.end, values, **shared)
        return cls(keys=key_side, values=value_side, page_bytes=-(-value_side.end // block_size) * block_size)


def write_rows(
    layout: SideLayout, page_Y: Tensor, first: int, coef_NC: Tensor, *, is_first: bool, rank_N: Tensor | None = None
) -> int:
    """Write rows `first` and following of a page; rows that were there are gone.

    Args:
        page_Y: uint8.
        coef_NC: all coefficients of the tokens.
        is_first: whether it is its sequence's first page.
        rank_N: how many coefficients each token asks for, where rows have ranks.

    Returns:
        how many rows are of a cheaper level than their tokens asked for.
    """
    capacity, room, rows = layout.row_capacity(is_first=is_first), layout.row_room(is_first=is_first), layout.rows
    start, cut = sum(rows.size(level) for level in levels_of(layout, page_Y, first)), 0
    for row, (coef_C, level) in enumerate(zip(coef_NC, rows.wanted(coef_NC, rank_N), strict=True), start=first):
        reserved, held = (capacity - row - 1) * rows.size(rows.least), level
        while held > rows.least and start + rows.size(held) + reserved > room:
            held = rows.cheaper(held)
        cut += held < level
        if rows.differ:
            rows.note(page_Y[layout.packed :], row, held)
            _mark(layout, page_Y, row, start)
        end = start + rows.size(held)
        page_Y[layout.first_row + start : layout.first_row + end] = rows.encode(coef_C, held)
        start = end
    return cut


def read_rows(layout: SideLayout, page_Y: Tensor, count: int) -> Tensor:
    """The first `count` rows of a page, (N, R) fp32, zero where a token has no coefficient."""
    rows, start = layout.rows, layout.first_row
    row_NR = torch.zeros(count, layout.row_format.num_coefficients, dtype=torch.float32, device="cpu")
    for row_R, level in zip(row_NR, levels_of(layout, page_Y, count), strict=True):
        end = start + rows.size(level)
        found_R = rows.decode(page_Y[start:end], level)
        row_R[: len(found_R)] = found_R
        start = end
    return row_NR


def levels_of(layout: SideLayout, page_Y: Tensor, count: int) -> list[int]:
    """The levels of the first `count` rows of a page."""
    return layout.rows.noted(page_Y[layout.packed :], count)


def _mark(layout: SideLayout, page_Y: Tensor, row: int, start: int) -> None:
    """Note where a row begins, if it is one of every 32."""
    if row % ROWS_BETWEEN_MARKS == 0:
        place = layout.marks + row // ROWS_BETWEEN_MARKS * MARK_BYTES
        page_Y[place : place + MARK_BYTES] = torch.tensor([start], dtype=torch.int32, device="cpu").view(torch.uint8)


def _aligned(place: int, to: int = _ALIGNMENT) -> int:
    return -(-place // to) * to
