"""Rows that keep a prefix of their coefficients, as floats or as integers with their scales before them: what pages hold of
tokens for which there is no plan of bits.

Shapes: N rows, R coefficients, Y bytes of a row.
"""

import dataclasses

import torch
from torch import Tensor

from lowrank_kv.stores.quantization import SCALE_DTYPE, IntegerQuantization
from lowrank_kv.utils.config import require

RANK_BYTES = 2  # of what says how many coefficients a token keeps


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankedRows:
    """How rows of one layer's keys, or values, lie in pages.

    Attributes:
        num_coefficients: R, the most that a token keeps.
        granularity: ranks are its multiples, or R; None where all tokens keep R.
        mean_row_bytes: of a row of the tokens that pages are made for.
        dtype: of floats, fp32 or bf16.
        quantization: how coefficients are integers; None where they are floats.

    Raises:
        UserError: there are no coefficients, or none that a token may keep.
    """

    num_coefficients: int
    granularity: int | None
    mean_row_bytes: float
    dtype: torch.dtype
    quantization: IntegerQuantization | None = None

    def __post_init__(self):
        require(1 <= self.num_coefficients < 2 ** (8 * RANK_BYTES), "rank", self.num_coefficients, "from 1 to 65535")
        require(self.granularity is None or self.granularity >= 1, "granularity", self.granularity, "at least 1")

    @property
    def least_rank(self) -> int:
        """The fewest coefficients of a token."""
        return min(self.granularity or self.num_coefficients, self.num_coefficients)

    def cheaper(self, rank: int) -> int:
        """The next smaller rank."""
        return (rank - 1) // self.granularity * self.granularity

    def row_bytes(self, rank: int) -> int:
        """Y, which is even."""
        if self.quantization is None:
            return rank * self.dtype.itemsize
        size = self.quantization.nbytes(rank)
        return size + size % 2

    def encode(self, coef_NR: Tensor) -> Tensor:
        """Rows of R coefficients each, (N, Y) uint8."""
        if self.quantization is None:
            return coef_NR.to(self.dtype).contiguous().view(torch.uint8)
        code_NY, scale_NS = self.quantization.encode(coef_NR)
        row_NY = code_NY.new_zeros(len(coef_NR), self.row_bytes(coef_NR.shape[1]), dtype=torch.uint8)
        scales = scale_NS.shape[1] * SCALE_DTYPE.itemsize
        row_NY[:, :scales] = scale_NS.contiguous().view(torch.uint8)
        row_NY[:, scales : scales + code_NY.shape[1]] = code_NY
        return row_NY

    def decode(self, row_NY: Tensor, rank: int) -> Tensor:
        """The coefficients, (N, R) fp32."""
        if self.quantization is None:
            return _numbers(row_NY, self.dtype).float()
        scales = self.quantization.scales_per_row(rank) * SCALE_DTYPE.itemsize
        scale_NS = _numbers(row_NY[:, :scales], SCALE_DTYPE)
        code_NY = row_NY[:, scales : scales + self.quantization.row_bytes(rank)]
        return self.quantization.decode(code_NY, scale_NS, rank, torch.float32)


def _numbers(byte_NY: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers, copied: rows of a page may begin at any byte, and numbers may not."""
    return byte_NY.clone(memory_format=torch.contiguous_format).view(dtype)
