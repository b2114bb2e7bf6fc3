"""Pages of equal size that each hold a block of a sequence's tokens as packed coefficients: what a paged server can share.

A page has a part for a layer's keys and one for its values:

    levels of rows | starts of rows | rows, one behind another … | exact states of the first tokens

The first tokens of a sequence, which are read by all others, may stay exact; only a sequence's first page holds some, and in
other pages rows may take their room. Where tokens have classes, or ranks of their own, rows differ in size: these are their
levels. A row is then of the level that its token asks for, or of the next cheaper one that leaves room for the cheapest
rows of all tokens still to come. This depends on nothing but the tokens before it in its page. So a page has the same bytes
however its tokens were divided into calls, a row that is written again takes all later ones with it, and sequences that
begin alike may share pages.

This file says where everything is, and writes and reads it in plain torch. Servers call `lowrank_kv/ops/native/pages.py`.

Shapes: N rows of one page, C joint width, R coefficients that are kept at most, Y bytes of a page, F exact tokens.
"""

import dataclasses
import math

import torch
from torch import Tensor

from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.ranked_rows import RANK_BYTES, RankedRows
from lowrank_kv.stores.token_plans import CLASSES_PER_BYTE, MARK_BYTES, ROWS_BETWEEN_MARKS, TokenPlans
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError

_ALIGNMENT = 16  # bytes

RowFormat = BitPlan | TokenPlans | RankedRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideLayout:
    """Where a layer's keys, or its values, are in a page; places are bytes from the page's start.

    Attributes:
        row_format: how rows are packed: by one plan, by that of their class, or as numbers of one width.
        block_size: tokens of a page.
        num_sinks: first tokens of a sequence, which stay exact.
        packed: where the levels of rows are: classes four to a byte, the first in its low bits, or ranks as uint16.
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
        if isinstance(row_format, TokenPlans):
            sizes = row_format.row_bytes()
            require(sizes == sorted(sizes), "plans", sizes, "of rows that take more bytes from class to class")
        differ, least = has_levels(row_format), _size(row_format, _least(row_format))
        packed = _aligned(start)
        marks = packed + _aligned(_level_bytes(row_format, block_size), MARK_BYTES)
        first_row = marks + -(-block_size // ROWS_BETWEEN_MARKS) * MARK_BYTES * differ

        def room(tokens: int) -> int:
            if not differ:
                return tokens * least
            return max(math.ceil(tokens * row_format.mean_row_bytes * (1 + margin)), tokens * least)

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

    @property
    def fixed_row_bytes(self) -> int:
        """Of every row, where rows have no levels."""
        return _size(self.row_format, _least(self.row_format))

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
        for row_format in (keys, values):
            if not isinstance(row_format, RowFormat):
                raise UserError(f"pages hold rows of {RowFormat}, not of {type(row_format).__name__}")
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
    capacity, room = layout.row_capacity(is_first=is_first), layout.row_room(is_first=is_first)
    row_format = layout.row_format
    least = _least(row_format)
    if isinstance(row_format, TokenPlans):
        wanted = row_format.classes(coef_NC).tolist()
    else:
        wanted = [least] * len(coef_NC) if rank_N is None else rank_N.tolist()
    start, cut = sum(_size(row_format, level) for level in levels_of(layout, page_Y, first)), 0
    for row, (coef_C, level) in enumerate(zip(coef_NC, wanted, strict=True), start=first):
        reserved, held = (capacity - row - 1) * _size(row_format, least), level
        while held > least and start + _size(row_format, held) + reserved > room:
            held = row_format.cheaper(held) if isinstance(row_format, RankedRows) else held - 1
        cut += held < level
        if has_levels(row_format):
            _note(layout, page_Y, row, held, start)
        size = _size(row_format, held)
        page_Y[layout.first_row + start : layout.first_row + start + size] = _encoded(row_format, held, coef_C)
        start += size
    return cut


def read_rows(layout: SideLayout, page_Y: Tensor, count: int) -> Tensor:
    """The first `count` rows of a page, (N, R) fp32, zero where a token has no coefficient."""
    row_format, start = layout.row_format, layout.first_row
    row_NR = torch.zeros(count, row_format.num_coefficients, dtype=torch.float32)
    for row_R, level in zip(row_NR, levels_of(layout, page_Y, count), strict=True):
        end = start + _size(row_format, level)
        code_1Y = page_Y[None, start:end]
        if isinstance(row_format, RankedRows):
            row_R[:level] = row_format.decode(code_1Y, level)[0]
        else:
            plan = _plan(row_format, level)
            rank = plan.num_coefficients
            row_R[:rank] = plan.decode(code_1Y, code_1Y[:, :0], rank, torch.float32)[0]
        start = end
    return row_NR


def levels_of(layout: SideLayout, page_Y: Tensor, count: int) -> list[int]:
    """The levels of the first `count` rows of a page."""
    row_format = layout.row_format
    if not has_levels(row_format):
        return [_least(row_format)] * count
    if isinstance(row_format, RankedRows):
        byte_Y = page_Y[layout.packed : layout.packed + RANK_BYTES * count]
        return (byte_Y[::2].int() | byte_Y[1::2].int() << 8).tolist()
    return [
        int(page_Y[layout.packed + row // CLASSES_PER_BYTE]) >> 2 * (row % CLASSES_PER_BYTE) & 3 for row in range(count)
    ]


def has_levels(row_format: RowFormat) -> bool:
    """Whether rows differ in size."""
    return isinstance(row_format, TokenPlans) or (
        isinstance(row_format, RankedRows) and row_format.granularity is not None
    )


def _note(layout: SideLayout, page_Y: Tensor, row: int, level: int, start: int) -> None:
    """Note a row's level, and of every 32nd where it begins."""
    if isinstance(layout.row_format, RankedRows):
        place = layout.packed + RANK_BYTES * row
        page_Y[place], page_Y[place + 1] = level & 255, level >> 8
    else:
        place, shift = layout.packed + row // CLASSES_PER_BYTE, 2 * (row % CLASSES_PER_BYTE)
        page_Y[place] = int(page_Y[place]) & ~(3 << shift) & 255 | level << shift
    if row % ROWS_BETWEEN_MARKS == 0:
        place = layout.marks + row // ROWS_BETWEEN_MARKS * MARK_BYTES
        page_Y[place : place + MARK_BYTES] = torch.tensor([start], dtype=torch.int32).view(torch.uint8)


def _encoded(row_format: RowFormat, level: int, coef_C: Tensor) -> Tensor:
    """The bytes of a row, (Y,)."""
    if isinstance(row_format, RankedRows):
        return row_format.encode(coef_C[None, :level])[0]
    plan = _plan(row_format, level)
    return plan.encode(coef_C[None, : plan.num_coefficients])[0][0]


def _least(row_format: RowFormat) -> int:
    """The cheapest level; the only one where there are none."""
    return row_format.least_rank if isinstance(row_format, RankedRows) else 0


def _size(row_format: RowFormat, level: int) -> int:
    """Bytes of a row of this level."""
    if isinstance(row_format, RankedRows):
        return row_format.row_bytes(level)
    plan = _plan(row_format, level)
    return plan.row_bytes(plan.num_coefficients)


def _level_bytes(row_format: RowFormat, tokens: int) -> int:
    """Bytes that say of which levels the rows of a page are."""
    if not has_levels(row_format):
        return 0
    return RANK_BYTES * tokens if isinstance(row_format, RankedRows) else -(-tokens // CLASSES_PER_BYTE)


def _plan(row_format: BitPlan | TokenPlans, level: int) -> BitPlan:
    return row_format.plans[level] if isinstance(row_format, TokenPlans) else row_format


def _aligned(place: int, to: int = _ALIGNMENT) -> int:
    return -(-place // to) * to
