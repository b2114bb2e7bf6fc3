"""Coefficients in fewer bits than floats have: the interface of all ways, and integers of 8 or 4 bits.

Shapes: N rows, R coefficients, K groups of a row, Y bytes of a row's codes, S scales of a row. Leading dims are kept.
"""

import abc
import dataclasses

import torch
from torch import Tensor

from lowrank_kv.utils.config import require

# How coefficients are stored: in the model's dtype (None), or as integers of this many bits.
CACHE_DTYPES = {"model": None, "int8": 8, "int4": 4}
MIXED = "mixed"  # or by a plan of bits (lowrank_kv/stores/bit_plan.py)
CACHE_DTYPE_HELP = "how coefficients are stored: in the model's dtype, or as integers with a scale for each token"
GROUP_SIZE_HELP = "coefficients that share a scale; all of a token where none is given"
REBUILD_COST_HELP = (
    "what keeping a coefficient of keys counts for beyond its own bits: decoding rebuilds all keys for each token, so that "
    "fewer coefficients of more bits are faster"
)

# Scales and offsets are bf16, which has the range of fp32; they are rounded before codes are chosen.
SCALE_DTYPE = torch.bfloat16
_ROUNDING = 2.0**-8
# Before quantizing, coefficients are divided by this power of their calibrated root mean square. 0 would drown the small
# ones in the steps of the large ones; 1 would spend as many steps on coefficients that hardly matter.
COEF_SCALE_POWER = 0.5


class Quantization(abc.ABC):
    """How rows are encoded as bytes, with scales beside them."""

    @abc.abstractmethod
    def row_bytes(self, rank: int) -> int:
        """Y, bytes of a row's codes."""

    @abc.abstractmethod
    def scales_per_row(self, rank: int) -> int:
        """S, numbers of :data:`SCALE_DTYPE` beside a row of `rank` coefficients."""

    def nbytes(self, rank: int) -> int:
        """Bytes of a row, scales included."""
        return self.row_bytes(rank) + self.scales_per_row(rank) * SCALE_DTYPE.itemsize

    @abc.abstractmethod
    def encode(self, rows_NR: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (…, N, Y) uint8 and scales (…, N, S) of rows of any floating dtype."""

    @abc.abstractmethod
    def decode(self, code_NY: Tensor, scale_NS: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
        """The rounded rows, (…, N, R) in `dtype`, from what :meth:`encode` returned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegerQuantization(Quantization):
    """Integers of 8 or 4 bits with a scale and an offset for each token, or for each group of its coefficients.

    Attributes:
        bits: 8, or 4, when two codes share a byte.
        group_size: how many coefficients share a scale; None when all of a row do.
    """

    bits: int
    group_size: int | None = None

    def __post_init__(self):
        require(
            self.group_size is None or self.group_size >= 2,
            "group_size",
            self.group_size,
            "at least 2, or none for whole rows",
        )

    def num_groups(self, rank: int) -> int:
        """K, how many scales a row of `rank` coefficients has."""
        return -(-rank // (self.group_size or max(rank, 1)))

    def row_bytes(self, rank: int) -> int:
        return rank if self.bits == 8 else -(-rank // 2)

    def scales_per_row(self, rank: int) -> int:
        return 2 * self.num_groups(rank)

    def encode(self, rows_NR: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (…, N, Y) uint8, two to a byte if they have 4 bits, and scales as :meth:`levels` gives them."""
        code_NR, scale_NS = self.levels(rows_NR)
        return self.pack(code_NR), scale_NS

    def levels(self, rows_NR: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (…, N, R) uint8, one to a byte, and scales (…, N, 2·K) bf16: K steps, then K least values.

        A value is rounded to ``least + step · code``, code in 0..2^bits − 1. The least and the largest value of a group are
        within its range, so nothing is clipped.
        """
        rank = rows_NR.shape[-1]
        rows_NR = rows_NR.float()
        group_of_R = self._group_of(rank, rows_NR.device)
        steps, least = [], []
        for part_NG in rows_NR.split(self.group_size or max(rank, 1), dim=-1):
            low_N, high_N = part_NG.aminmax(dim=-1)
            # Widen the range by the most that rounding to bf16 may take away.
            low_N = (low_N - low_N.abs() * _ROUNDING).to(SCALE_DTYPE)
            step_N = (high_N - low_N.float()) * (1 + _ROUNDING) / (2**self.bits - 1)
            steps.append(step_N.to(SCALE_DTYPE))
            least.append(low_N)
        scale_NK, least_NK = torch.stack(steps, dim=-1), torch.stack(least, dim=-1)
        step_NR = scale_NK.float()[..., group_of_R]
        level_NR = (rows_NR - least_NK.float()[..., group_of_R]) / step_NR.clamp(min=torch.finfo(torch.float32).tiny)
        code_NR = level_NR.round().clamp(0, 2**self.bits - 1).to(torch.uint8)
        return code_NR, torch.cat([scale_NK, least_NK], dim=-1)

    def decode(self, code_NY: Tensor, scale_NS: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
        # In place and in fp32, which a CPU does several times as fast as a fused operation on broadcast halves.
        scale_NK, least_NK = scale_NS.float().chunk(2, dim=-1)
        if self.group_size is not None:
            group_of_R = self._group_of(rank, code_NY.device)
            scale_NK, least_NK = scale_NK[..., group_of_R], least_NK[..., group_of_R]
        return self.unpack(code_NY, rank).float().mul_(scale_NK).add_(least_NK).to(dtype)

    def _group_of(self, rank: int, device: torch.device) -> Tensor:
        return torch.arange(rank, device=device) // (self.group_size or max(rank, 1))

    def pack(self, code_NR: Tensor) -> Tensor:
        """Codes (…, N, R) as they are stored, (…, N, Y). With 4 bits, the first half of a row is in the low bits, the second
        half in the high ones."""
        if self.bits == 8:
            return code_NR
        half = self.row_bytes(code_NR.shape[-1])
        low_NY, high_NY = code_NR[..., :half].clone(), code_NR[..., half:]
        low_NY[..., : high_NY.shape[-1]] |= high_NY << 4
        return low_NY

    def unpack(self, code_NY: Tensor, rank: int) -> Tensor:
        """Undo :meth:`pack`, (…, N, R); `rank` is R."""
        if self.bits == 8:
            return code_NY
        return torch.cat([code_NY & 15, code_NY >> 4], dim=-1)[..., :rank]


def quantization_of(cache_dtype: str, group_size: int | None) -> IntegerQuantization | None:
    """The quantization that a configuration's `cache_dtype` and `group_size` ask for; None for the model's dtype."""
    bits = CACHE_DTYPES[cache_dtype]
    require(
        bits is not None or group_size is None,
        "group_size",
        group_size,
        "none where coefficients are stored in the model's dtype",
    )
    return None if bits is None else IntegerQuantization(bits=bits, group_size=group_size)


def coef_scale_of(energy_R: Tensor) -> Tensor:
    """The fp32 numbers (…, R) that coefficients are divided by before they are quantized, from their calibrated energies."""
    floor = energy_R.amax(dim=-1, keepdim=True) * 1e-6
    return energy_R.float().clamp(min=floor).clamp(min=torch.finfo(torch.float32).tiny) ** (COEF_SCALE_POWER / 2)
