"""Coefficients at widths of their own, from one bit to 16, with one scale for each token.

A row is one string of bits: eight of the token's scale, then the coefficients' codes without gaps, the wide ones first. Rank
reduction (16 bits for some coefficients, none for the others) and integers of one width are special cases.

Shapes: N rows, R coefficients, Y bytes of a row, L levels of all codebooks. Leading dims are kept.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowrank_kv.stores.quantization import Quantization
from lowrank_kv.utils.config import require

# Bits that a coefficient may have. 16 are those of bf16, for coefficients that no codebook serves.
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 16)
UNCODED = 16
# A row's scale is 2^((code − 128) / 8). Steps of an eighth of an octave cost nothing, as rows are divided by what is stored.
SCALE_BITS = 8
_STEPS_PER_OCTAVE, _SCALE_OFFSET = 8, 128
# Rows that are packed at once, which bounds the memory that takes.
_TILE_ROWS = 2048


class BitPlan(Quantization):
    """How rows of one layer's keys, or values, are packed.

    A row is divided by its root mean square, and each coefficient becomes the number of the nearest level among those of its
    width. A row may have fewer coefficients than the plan, but always the first ones.

    Args:
        bits: of each coefficient, falling.
        levels: bits → the levels of a codebook, (2**bits,) fp32, rising, for rows of mean square 1; one for each width that
            `bits` has, but 16.
        device: of rows; by default that of the codebooks, of which a plan of 16 bits alone has none.

    Attributes:
        byte_R, shift_R, mask_R: where a code is: in the two bytes of the row from this one on, after so many bits, and under
            this mask. int64.
        first_level_R: place in `table_L` of a coefficient's lowest level. int64.
        table_L: the levels of all codebooks, fp32.
        native_view: what compiled code has made of the plan.

    Raises:
        UserError: a width is none of :data:`WIDTHS` or has no codebook, or widths rise.
    """

    def __init__(self, bits: Sequence[int], levels: Mapping[int, Tensor], device: torch.device | None = None):
        self.bits = tuple(bits)
        for width in sorted(set(self.bits)):
            require(width in WIDTHS, "bits", width, f"among {', '.join(map(str, WIDTHS))}")
            size = len(levels[width]) if width in levels else None
            require(width == UNCODED or size == 2**width, f"levels[{width}]", size, f"a codebook of {2**width} levels")
        require(self.bits == tuple(sorted(self.bits, reverse=True)), "bits", self.bits, "falling")
        self.levels = {width: levels[width] for width in sorted(set(self.bits) - {UNCODED})}
        self._bits_before = list(itertools.accumulate(self.bits, initial=SCALE_BITS))
        self.num_uncoded = self.bits.count(UNCODED)
        self.native_view: Any = None
        if device is None:
            device = next(iter(self.levels.values())).device if self.levels else torch.device("cpu")
        start_R = torch.tensor(self._bits_before[:-1], device=device)
        self.byte_R, self.shift_R = start_R // 8, start_R % 8
        self.mask_R = torch.tensor([2**width - 1 for width in self.bits], device=device)
        self.table_L, firsts = laid_out(self.levels, device)
        self.first_level_R = torch.tensor([firsts.get(width, 0) for width in self.bits], device=device)

    @property
    def num_coefficients(self) -> int:
        """The most coefficients that a row can have."""
        return len(self.bits)

    def to(self, device: torch.device) -> "BitPlan":
        """The same plan for rows on a device."""
        return BitPlan(self.bits, {width: level_L.to(device) for width, level_L in self.levels.items()}, device)

    def row_bytes(self, rank: int) -> int:
        return -(-self._bits_before[rank] // 8)

    def scales_per_row(self, rank: int) -> int:
        return 0  # it is in the row

    def encode(self, rows_NR: Tensor) -> tuple[Tensor, Tensor]:
        rank = rows_NR.shape[-1]
        row_NY = rows_NR.new_empty(*rows_NR.shape[:-1], self.row_bytes(rank), dtype=torch.uint8)
        for tile_NR, tile_NY in zip(rows_NR.split(_TILE_ROWS, dim=-2), row_NY.split(_TILE_ROWS, dim=-2), strict=True):
            self._pack(tile_NR.float(), tile_NY)
        return row_NY, rows_NR.new_empty(*rows_NR.shape[:-1], 0)

    def rounded(self, rows_NR: Tensor) -> Tensor:
        """What :meth:`decode` gives of encoded rows, (…, N, R) fp32, without packing them."""
        scale_code_N, unit_NR = _scaled(rows_NR.float())
        parts = []
        for width, places in self.runs(rows_NR.shape[-1]):
            part_NR = unit_NR[..., places].contiguous()
            if width == UNCODED:
                parts.append(part_NR.bfloat16().float())
            else:
                parts.append(self.levels[width][torch.bucketize(part_NR, self.thresholds[width])])
        return torch.cat(parts, dim=-1) * _scale_of(scale_code_N)[..., None]

    def _pack(self, rows_NR: Tensor, row_NY: Tensor) -> None:
        """Write the rows' bytes."""
        rank = rows_NR.shape[-1]
        scale_code_N, unit_NR = _scaled(rows_NR)
        code_NR = torch.empty_like(unit_NR, dtype=torch.long)
        for width, places in self.runs(rank):
            part_NR = unit_NR[..., places].contiguous()
            if width == UNCODED:
                code_NR[..., places] = part_NR.bfloat16().view(torch.int16).long() & 0xFFFF
            else:
                code_NR[..., places] = torch.bucketize(part_NR, self.thresholds[width])
        # A code's bits fall into two bytes. No two codes share a bit, so that adding is setting.
        two_bytes_NR = code_NR << self.shift_R[:rank]
        byte_NY = rows_NR.new_zeros(*rows_NR.shape[:-1], row_NY.shape[-1] + 1, dtype=torch.long)
        byte_NY.index_add_(-1, self.byte_R[:rank], two_bytes_NR & 255)
        byte_NY.index_add_(-1, self.byte_R[:rank] + 1, two_bytes_NR >> 8)
        byte_NY[..., 0] = scale_code_N.long()
        row_NY.copy_(byte_NY[..., :-1])

    def decode(self, code_NY: Tensor, scale_NS: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
        byte_NY = torch.nn.functional.pad(code_NY, (0, 1)).int()
        byte_R = self.byte_R[:rank]
        two_bytes_NR = byte_NY[..., byte_R] | byte_NY[..., byte_R + 1] << 8
        code_NR = (two_bytes_NR >> self.shift_R[:rank]) & self.mask_R[:rank]
        uncoded = min(self.num_uncoded, rank)
        unit_NR = self.table_L[self.first_level_R[uncoded:rank] + code_NR[..., uncoded:]]
        if uncoded:
            first_NR = code_NR[..., :uncoded].to(torch.int16).view(torch.bfloat16).float()
            unit_NR = torch.cat([first_NR, unit_NR], dim=-1)
        return (unit_NR * _scale_of(code_NY[..., :1])).to(dtype)

    @functools.cached_property
    def descriptor_3R(self) -> Tensor:  # noqa: N802 (a tensor's dims are part of its name)
        """What kernels read of each coefficient, int32: its first bit in the row, the mask under which its code is, and the
        place in `table_L` of its lowest level, −1 where the code is the upper half of an fp32 number."""
        is_uncoded_R = torch.arange(self.num_coefficients, device=self.mask_R.device) < self.num_uncoded
        first_R = self.first_level_R.masked_fill(is_uncoded_R, -1)
        return torch.stack([self.byte_R * 8 + self.shift_R, self.mask_R, first_R]).int()

    @functools.cached_property
    def thresholds(self) -> dict[int, Tensor]:
        """Bits → the middles between neighbouring levels."""
        return {width: (level_L[1:] + level_L[:-1]) / 2 for width, level_L in self.levels.items()}

    def runs(self, rank: int) -> list[tuple[int, slice]]:
        """(bits, places) of neighbours of one width in rows of `rank` coefficients."""
        found, start = [], 0
        for width, run in itertools.groupby(self.bits[:rank]):
            end = start + len(list(run))
            found.append((width, slice(start, end)))
            start = end
        return found


def laid_out(levels: Mapping[int, Tensor], device: torch.device) -> tuple[Tensor, dict[int, int]]:
    """Codebooks one after another, narrow ones first, and a zero behind them; and the place of each width's lowest level."""
    widths = sorted(levels)
    firsts = dict(zip(widths, itertools.accumulate((2**width for width in widths), initial=0), strict=False))
    return torch.cat([*(levels[width] for width in widths), torch.zeros(1, dtype=torch.float32, device=device)]), firsts


def _scaled(rows_NR: Tensor) -> tuple[Tensor, Tensor]:
    """(codes of the scales, rows divided by their scales) of fp32 rows."""
    octaves_N = rows_NR.square().mean(dim=-1).sqrt().clamp(min=2.0**-16).log2()
    step_N = (octaves_N * _STEPS_PER_OCTAVE).round().clamp(-_SCALE_OFFSET, 255 - _SCALE_OFFSET)
    code_N = step_N + _SCALE_OFFSET
    return code_N, rows_NR / _scale_of(code_N)[..., None]


def _scale_of(code_N: Tensor) -> Tensor:
    return ((code_N.float() - _SCALE_OFFSET) / _STEPS_PER_OCTAVE).exp2()
