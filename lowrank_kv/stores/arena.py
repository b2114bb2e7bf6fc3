"""Pages of equal size that each hold a block of a sequence's tokens as packed coefficients: what a paged server can share.

A page has a part for a layer's keys and one for its values:

    classes of rows | starts of rows | rows, one behind another … | exact states of the first tokens

The first tokens of a sequence, which are read by all others, stay exact; only a sequence's first page holds some, and in
other pages rows may take their room. Where tokens have classes, rows differ in size. A row is then of the class that its
token asks for, or of the next cheaper one that leaves room for the cheapest rows of all tokens still to come. This depends
on nothing but the tokens before it in its page. So a page has the same bytes however its tokens were divided into calls, a
row that is written again takes all later ones with it, and sequences that begin alike may share pages.

This file says where everything is, and writes and reads it in plain torch. Servers call `lowrank_kv/ops/native/pages.py`.

Shapes: N rows of one page, C joint width, R coefficients that are kept at most, Y bytes of a page, F exact tokens.
"""

import dataclasses
import math

import torch
from torch import Tensor

from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.token_plans import CLASSES_PER_BYTE, MARK_BYTES, ROWS_BETWEEN_MARKS, TokenPlans
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError

_ALIGNMENT = 16  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideLayout:
    """Where a layer's keys, or its values, are in a page; places are bytes from the page's start.

    Attributes:
        quantization: how rows are packed: by one plan, or by that of their class.
        block_size: tokens of a page.
        num_sinks: first tokens of a sequence, which stay exact.
        packed: where the classes of rows are, four to a byte, the first in its low bits.
        marks: where the starts of every 32nd row are, int32, counted from the first row.
        rows: where the first row is.
        sinks: where exact states are in a sequence's first page, (F, C) in the model's dtype.
        end: what follows belongs to something else.
    """

    quantization: BitPlan | TokenPlans
    block_size: int
    num_sinks: int
    packed: int
    marks: int
    rows: int
    sinks: int
    end: int

    @classmethod
    def after(
        cls,
        start: int,
        quantization: BitPlan | TokenPlans,
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
        has_classes = isinstance(quantization, TokenPlans)
        sizes = _row_sizes(quantization)
        require(sizes == sorted(sizes), "plans", sizes, "of rows that take more bytes from class to class")
        packed = _aligned(start)
        marks = packed + _aligned(-(-block_size // CLASSES_PER_BYTE), MARK_BYTES) * has_classes
        rows = marks + -(-block_size // ROWS_BETWEEN_MARKS) * MARK_BYTES * has_classes

        def room(tokens: int) -> int:
            if not has_classes:
                return tokens * sizes[0]
            return max(math.ceil(tokens * quantization.mean_row_bytes * (1 + margin)), tokens * sizes[0])

        sinks = _aligned(rows + room(block_size - num_sinks))
        end = max(sinks + num_sinks * sink_bytes, rows + room(block_size))
        return cls(
            quantization=quantization,
            block_size=block_size,
            num_sinks=num_sinks,
            packed=packed,
            marks=marks,
            rows=rows,
            sinks=sinks,
            end=end,
        )

    @property
    def sizes(self) -> list[int]:
        """Bytes of a row of each class."""
        return _row_sizes(self.quantization)

    def row_capacity(self, *, is_first: bool) -> int:
        """Rows of a page, which in a sequence's first one follow its sinks."""
        return self.block_size - self.num_sinks * is_first

    def row_room(self, *, is_first: bool) -> int:
        """Bytes for all rows of a page."""
        return (self.sinks if is_first else self.end) - self.rows


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
        keys: BitPlan | TokenPlans,
        values: BitPlan | TokenPlans,
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
        for quantization in (keys, values):
            if not isinstance(quantization, (BitPlan, TokenPlans)):
                raise UserError(
                    "pages hold coefficients packed by a plan of bits; take a preset with `cache_dtype: mixed` "
                    "(static-mixed, tokenwise-mixed), or a checkpoint with `rank_policy: plan`"
                )
        require(0 <= num_sinks < block_size, "num_sink_tokens", num_sinks, f"below the block size, {block_size} tokens")
        require(margin >= 0, "page_margin", margin, "zero or positive; 0.05 leaves room for 5 % more")
        shared = {"block_size": block_size, "num_sinks": num_sinks, "sink_bytes": sink_bytes, "margin": margin}
        key_side = SideLayout.after(0, keys, **shared)
        value_side = SideLayout.after(key_side.end, values, **shared)
        return cls(keys=key_side, values=value_side, page_bytes=-(-value_side.end // block_size) * block_size)


def write_rows(layout: SideLayout, page_Y: Tensor, first: int, coef_NC: Tensor, *, is_first: bool) -> int:
    """Write rows `first` and following of a page; rows that were there are gone.

    Args:
        page_Y: uint8.
        coef_NC: all coefficients of the tokens.
        is_first: whether it is its sequence's first page.

    Returns:
        how many rows are of a cheaper class than their tokens asked for.
    """
    capacity, room, sizes = layout.row_capacity(is_first=is_first), layout.row_room(is_first=is_first), layout.sizes
    plans = _plans(layout)
    wanted = layout.quantization.classes(coef_NC).tolist() if _has_classes(layout) else [0] * len(coef_NC)
    start, cut = sum(sizes[k] for k in classes_of(layout, page_Y, first)), 0
    for row, (coef_C, k) in enumerate(zip(coef_NC, wanted, strict=True), start=first):
        reserved = (capacity - row - 1) * sizes[0]
        held = max(j for j in range(k + 1) if j == 0 or start + sizes[j] + reserved <= room)
        cut += held < k
        if _has_classes(layout):
            _note(layout, page_Y, row, held, start)
        code_1Y, _ = plans[held].encode(coef_C[None, : plans[held].num_coefficients])
        page_Y[layout.rows + start : layout.rows + start + sizes[held]] = code_1Y[0]
        start += sizes[held]
    return cut


def read_rows(layout: SideLayout, page_Y: Tensor, count: int) -> Tensor:
    """The first `count` rows of a page, (N, R) fp32, zero where a token has no coefficient."""
    plans = _plans(layout)
    row_NR = torch.zeros(count, layout.quantization.num_coefficients)
    start = layout.rows
    for row_R, k in zip(row_NR, classes_of(layout, page_Y, count), strict=True):
        plan, end = plans[k], start + layout.sizes[k]
        code_1Y = page_Y[None, start:end]
        row_R[: plan.num_coefficients] = plan.decode(code_1Y, code_1Y[:, :0], plan.num_coefficients, torch.float32)[0]
        start = end
    return row_NR


def classes_of(layout: SideLayout, page_Y: Tensor, count: int) -> list[int]:
    """The classes of the first `count` rows of a page."""
    if not _has_classes(layout):
        return [0] * count
    return [
        int(page_Y[layout.packed + row // CLASSES_PER_BYTE]) >> 2 * (row % CLASSES_PER_BYTE) & 3 for row in range(count)
    ]


def _note(layout: SideLayout, page_Y: Tensor, row: int, k: int, start: int) -> None:
    """Note a row's class, and of every 32nd where it begins."""
    place, shift = layout.packed + row // CLASSES_PER_BYTE, 2 * (row % CLASSES_PER_BYTE)
    page_Y[place] = int(page_Y[place]) & ~(3 << shift) & 255 | k << shift
    if row % ROWS_BETWEEN_MARKS == 0:
        place = layout.marks + row // ROWS_BETWEEN_MARKS * MARK_BYTES
        page_Y[place : place + MARK_BYTES] = torch.tensor([start], dtype=torch.int32).view(torch.uint8)


def _has_classes(layout: SideLayout) -> bool:
    return isinstance(layout.quantization, TokenPlans)


def _plans(layout: SideLayout) -> tuple[BitPlan, ...]:
    """The plan of each class."""
    return layout.quantization.plans if _has_classes(layout) else (layout.quantization,)


def _row_sizes(quantization: BitPlan | TokenPlans) -> list[int]:
    if isinstance(quantization, TokenPlans):
        return quantization.row_bytes()
    return [quantization.row_bytes(quantization.num_coefficients)]


def _aligned(place: int, to: int = _ALIGNMENT) -> int:
    return -(-place // to) * to
