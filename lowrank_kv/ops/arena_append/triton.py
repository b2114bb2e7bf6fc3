"""New tokens into pages of packed coefficients, on the device and without a word from the host.

For each side, keys and values: which class of plans each token asks for (:mod:`.classes`), what its page has room for
(:mod:`.places`), and its bytes (:mod:`.rows`). Rows that do not differ need only the last.

Bytes are those of compiled C (:meth:`lowrank_kv.ops.native.pages.Pages.write`) and of
:func:`lowrank_kv.stores.arena.write_rows`, but where these differ from each other: where a token's score, its mean square or
a coefficient lies so near the border of two classes, scales or codes that the order of a sum or the last bit of a logarithm
or a power decides; and a group's least value that is zero may have either sign.

Shapes: T new tokens, C joint width, X pages of Y bytes.
"""

import torch
import triton
from torch import Tensor

from lowrank_kv.ops.arena_append.classes import ask_classes
from lowrank_kv.ops.arena_append.places import place_rows
from lowrank_kv.ops.arena_append.rows import pack_planned, pack_ranked
from lowrank_kv.ops.arena_append.tables import PlannedTables, sizes_of
from lowrank_kv.ops.native.pages import NewTokens
from lowrank_kv.ops.triton.availability import launching_on
from lowrank_kv.stores.arena import PageLayout, SideLayout
from lowrank_kv.stores.ranked_rows import RankedRows
from lowrank_kv.stores.token_plans import MOST_CLASSES, TokenPlans
from lowrank_kv.utils.errors import UserError

_WORD_BYTES = 4  # the widest number that kernels write at once
_INTEGERS = {4: torch.int32, 2: torch.int16}  # states are copied as they are, whatever they say
# New tokens that a program looks at together to find those of its page.
_TOKENS_AT_ONCE = 128
# Coefficients that a program works on: those of one wide row, or of several narrow ones.
_NUMBERS_AT_ONCE = 512


class PageWriter:
    """Writes the pages of one layer.

    Args:
        page_XY: uint8, one page after another, the bytes of each side by side; pages begin at multiples of 4 bytes.
        layout: of each; plans on any device.

    Attributes:
        cut: how many rows of all calls so far are of a cheaper level than asked for, because their pages are full, int64 on
            the pages' device; reading it waits for the device.

    Raises:
        UserError: pages are smaller than their layout, or do not begin at such places.
    """

    def __init__(self, page_XY: Tensor, layout: PageLayout):
        if page_XY.shape[1] < layout.page_bytes:
            raise UserError(f"pages have {page_XY.shape[1]} bytes, and their layout needs {layout.page_bytes}")
        stride = page_XY.stride(0)
        if stride % _WORD_BYTES or page_XY.storage_offset() % _WORD_BYTES:
            raise UserError(
                f"pages must begin at multiples of {_WORD_BYTES} bytes; got one every {stride} bytes, the first at "
                f"{page_XY.storage_offset()}; use a block size that is a multiple of {_WORD_BYTES}"
            )
        self.cut = torch.zeros((), dtype=torch.int64, device=page_XY.device)
        self._page_XY = page_XY
        self._sides = [_SideWriter(page_XY, side, self.cut) for side in (layout.keys, layout.values)]

    def write(
        self, new: NewTokens, key_TC: Tensor, value_TC: Tensor, ranks: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Write tokens; nothing waits for the device.

        Args:
            new: those of a page in their order and without gaps, others between them or not.
            key_TC, value_TC: all coefficients of each, fp32, those of a token side by side.
            ranks: how many of them each token asks to keep, of keys and of values, (T,) int64, where rows have ranks.
        """
        if not len(new.slot_T):
            return
        states = (state_TGD.view(_INTEGERS[state_TGD.element_size()]) for state_TGD in (new.key_TGD, new.value_TGD))
        asked = (None, None) if ranks is None else ranks
        with launching_on(self._page_XY.device):
            for side, state_TGD, coef_TC, rank_T in zip(self._sides, states, (key_TC, value_TC), asked, strict=True):
                side.write(new, state_TGD, coef_TC, rank_T)


class _SideWriter:
    """Writes a layer's keys, or its values."""

    def __init__(self, page_XY: Tensor, side: SideLayout, cut: Tensor):
        self._page_XY, self._side, self._cut = page_XY, side, cut
        row_format, device = side.row_format, page_XY.device
        self._gate = _Gate(row_format, device) if isinstance(row_format, TokenPlans) else None
        self._tables = None if isinstance(row_format, RankedRows) else PlannedTables.of(row_format, device)
        self._size_W = sizes_of(row_format, side.rows, device) if side.rows.differ else None
        self._in_pages = {"BLOCK_SIZE": side.block_size, "NUM_SINKS": side.num_sinks}

    def write(self, new: NewTokens, state_TGD: Tensor, coef_TC: Tensor, rank_T: Tensor | None) -> None:
        """As :meth:`PageWriter.write`; states as integers."""
        start_T = level_T = None
        if self._side.rows.differ:
            asked_T = rank_T if self._gate is None else self._gate.asked_classes(coef_TC, new.slot_T)
            start_T, level_T = self._places(new, asked_T)
        tokens, (_, heads, head_dim) = len(new.slot_T), state_TGD.shape
        rank, width = self._side.row_format.num_coefficients, heads * head_dim
        block_n = _tokens_of_a_program(max(rank, width))
        tensors = self._page_XY, new.slot_T, new.position_T, coef_TC, state_TGD, start_T, level_T
        numbers = tokens, self._page_XY.stride(0), coef_TC.stride(0), *state_TGD.stride()[:2]
        places = self._side.first_row, self._side.sinks
        constants = {
            **self._in_pages,
            "HEAD_DIM": head_dim,
            "WIDTH": width,
            "BLOCK_C": triton.next_power_of_2(width),
            "BLOCK_R": triton.next_power_of_2(rank),
            "BLOCK_N": block_n,
            "num_warps": _warps_of_a_program(max(rank, width)),
        }
        grid = (triton.cdiv(tokens, block_n),)
        if self._tables is None:
            row_bytes = self._side.row_format.row_bytes(rank)
            pack_ranked[grid](*tensors, *numbers, *places, row_bytes, **constants, **_kinds_of(self._side.row_format))
            return
        tables, most_bytes = self._tables, self._tables.first_coef_KY.shape[1]
        pack_planned[grid](
            *tensors,
            tables.rank_K,
            tables.size_K,
            tables.descriptor_K3R,
            tables.threshold_L,
            tables.first_coef_KY,
            torch.empty(tokens, rank, dtype=torch.int16, device=coef_TC.device),
            *numbers,
            *places,
            **constants,
            MOST_RANK=rank,
            MOST_BYTES=most_bytes,
            WIDEST=tables.widest,
            MOST_IN_BYTE=tables.most_in_byte,
            BLOCK_Y=triton.next_power_of_2(most_bytes),
        )

    def _places(self, new: NewTokens, asked_T: Tensor) -> tuple[Tensor, Tensor]:
        """Where each row starts, and its level, (T,) int32 each."""
        side, tokens = self._side, len(asked_T)
        start_T, level_T = (torch.empty(tokens, dtype=torch.int32, device=asked_T.device) for _ in range(2))
        place_rows[(tokens,)](
            self._page_XY,
            new.slot_T,
            new.position_T,
            asked_T,
            self._size_W,
            start_T,
            level_T,
            self._cut,
            tokens,
            self._page_XY.stride(0),
            side.packed,
            side.marks,
            side.row_room(is_first=True),
            side.row_room(is_first=False),
            **self._in_pages,
            IS_CLASS=self._tables is not None,
            LEAST=side.rows.least,
            GRANULARITY=1 if self._tables is not None else side.row_format.granularity,
            BLOCK_M=triton.next_power_of_2(side.block_size),
            BLOCK_N=_TOKENS_AT_ONCE,
        )
        return start_T, level_T


class _Gate:
    """What tells a token's class."""

    def __init__(self, plans: TokenPlans, device: torch.device):
        gate = plans.gate.check()
        weights = gate.linear_C, gate.square_C, gate.rest_3, plans.bounds_K
        self._weights = [weight.float().contiguous().to(device) for weight in weights]
        self._leading = gate.leading

    def asked_classes(self, coef_TC: Tensor, slot_T: Tensor) -> Tensor:
        """The class that each token asks for, (T,) int32; anything where it has no place."""
        tokens, width = len(slot_T), len(self._weights[0])
        asked_T = torch.empty(tokens, dtype=torch.int32, device=coef_TC.device)
        block_n = _tokens_of_a_program(width)
        ask_classes[(triton.cdiv(tokens, block_n),)](
            coef_TC,
            slot_T,
            *self._weights,
            asked_T,
            tokens,
            coef_TC.stride(0),
            self._leading,
            len(self._weights[-1]),
            WIDTH=width,
            BLOCK_C=triton.next_power_of_2(width),
            BLOCK_K=MOST_CLASSES,
            BLOCK_N=block_n,
            num_warps=_warps_of_a_program(width),
        )
        return asked_T


def _tokens_of_a_program(width: int) -> int:
    """Tokens of so many coefficients that a program works on."""
    return max(1, _NUMBERS_AT_ONCE // triton.next_power_of_2(width))


def _warps_of_a_program(width: int) -> int:
    """So many that a thread has a few numbers."""
    return min(max(4, triton.next_power_of_2(width) // 512), 8)


def _kinds_of(rows: RankedRows) -> dict[str, int]:
    """What :func:`.rows.pack_ranked` is compiled for."""
    rank, integers = rows.num_coefficients, rows.quantization
    group = rank if integers is None else min(integers.group_size or rank, rank)
    return {
        "RANK": rank,
        "BITS": 8 * rows.dtype.itemsize if integers is None else integers.bits,
        "GROUP": group,
        "BLOCK_K": triton.next_power_of_2(triton.cdiv(rank, group)),
        "BLOCK_G": triton.next_power_of_2(group),
    }
