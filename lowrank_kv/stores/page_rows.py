"""How rows lie in pages: what each takes, and which cheaper rows a token may be given where a page is full.

Rows that differ in size are of levels, which a page notes: classes of tokens, or ranks. The higher a level, the more bytes.

Shapes: N tokens, C coefficients, R of them that a row has, Y bytes of a row, P bytes that note levels.
"""

import abc

import torch
from torch import Tensor

from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.ranked_rows import RANK_BYTES, RankedRows
from lowrank_kv.stores.rows_of_classes import CLASSES_PER_BYTE, set_class, unpacked_classes
from lowrank_kv.stores.token_plans import TokenPlans
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError

RowFormat = BitPlan | TokenPlans | RankedRows


class PageRows(abc.ABC):
    """Rows of one layer's keys, or values, as pages hold them.

    Attributes:
        least: the cheapest level; the only one where rows do not differ.
        differ: whether rows are of several levels.
    """

    least: int = 0
    differ: bool = True

    @property
    @abc.abstractmethod
    def mean_bytes(self) -> float:
        """Of a row of the tokens that pages are made for."""

    @abc.abstractmethod
    def size(self, level: int) -> int:
        """Bytes of a row of this level."""

    def cheaper(self, level: int) -> int:
        """The next cheaper level of one above the least."""
        return level - 1

    @abc.abstractmethod
    def wanted(self, coef_NC: Tensor, rank_N: Tensor | None) -> list[int]:
        """The level that each token asks for, from all of its coefficients, or from what its gate says where it has one."""

    @abc.abstractmethod
    def encode(self, coef_C: Tensor, level: int) -> Tensor:
        """The bytes of a row, (Y,) uint8."""

    @abc.abstractmethod
    def decode(self, code_Y: Tensor, level: int) -> Tensor:
        """The coefficients of a row, (R,) fp32."""

    @abc.abstractmethod
    def noted_bytes(self, tokens: int) -> int:
        """P, for the rows of so many tokens."""

    @abc.abstractmethod
    def note(self, noted_P: Tensor, row: int, level: int) -> None:
        """Note a row's level."""

    @abc.abstractmethod
    def noted(self, noted_P: Tensor, count: int) -> list[int]:
        """The levels of the first rows."""


def page_rows(row_format: RowFormat) -> PageRows:
    """How rows that are packed so lie in pages.

    Raises:
        UserError: pages hold no such rows, or a class of tokens that asks for more has smaller ones.
    """
    if isinstance(row_format, TokenPlans):
        return _ClassRows(row_format)
    if isinstance(row_format, BitPlan):
        return _PlannedRows(row_format)
    if isinstance(row_format, RankedRows):
        return _EqualRanks(row_format) if row_format.granularity is None else _RankRows(row_format)
    raise UserError(f"pages hold rows of {RowFormat}, not of {type(row_format).__name__}")


class _EqualRows(PageRows):
    """All rows are of one level, which no page notes."""

    differ = False

    @property
    def mean_bytes(self) -> float:
        return float(self.size(self.least))

    def wanted(self, coef_NC: Tensor, rank_N: Tensor | None) -> list[int]:
        return [self.least] * len(coef_NC)

    def noted_bytes(self, tokens: int) -> int:
        return 0

    def note(self, noted_P: Tensor, row: int, level: int) -> None:
        pass

    def noted(self, noted_P: Tensor, count: int) -> list[int]:
        return [self.least] * count


class _PlannedRows(_EqualRows):
    """By one plan for all tokens."""

    def __init__(self, plan: BitPlan):
        self._plan = plan

    def size(self, level: int) -> int:
        return self._plan.row_bytes(self._plan.num_coefficients)

    def encode(self, coef_C: Tensor, level: int) -> Tensor:
        return _packed(self._plan, coef_C)

    def decode(self, code_Y: Tensor, level: int) -> Tensor:
        return _unpacked(self._plan, code_Y)


class _ClassRows(PageRows):
    """By a plan for each class of tokens; levels are classes, four to a byte, the first in its low bits."""

    def __init__(self, plans: TokenPlans):
        self._plans, self._sizes = plans, plans.row_bytes()
        require(
            self._sizes == sorted(self._sizes), "plans", self._sizes, "of rows that take more bytes from class to class"
        )

    @property
    def mean_bytes(self) -> float:
        return self._plans.mean_row_bytes

    def size(self, level: int) -> int:
        return self._sizes[level]

    def wanted(self, coef_NC: Tensor, rank_N: Tensor | None) -> list[int]:
        return self._plans.classes(coef_NC).tolist()

    def encode(self, coef_C: Tensor, level: int) -> Tensor:
        return _packed(self._plans.plans[level], coef_C)

    def decode(self, code_Y: Tensor, level: int) -> Tensor:
        return _unpacked(self._plans.plans[level], code_Y)

    def noted_bytes(self, tokens: int) -> int:
        return -(-tokens // CLASSES_PER_BYTE)

    def note(self, noted_P: Tensor, row: int, level: int) -> None:
        set_class(noted_P, row, level)

    def noted(self, noted_P: Tensor, count: int) -> list[int]:
        return unpacked_classes(noted_P[: self.noted_bytes(count)], count).tolist()


class _Ranked(PageRows):
    """As numbers of one width; levels are ranks."""

    def __init__(self, rows: RankedRows):
        self._rows, self.least = rows, rows.least_rank

    def size(self, level: int) -> int:
        return self._rows.row_bytes(level)

    def encode(self, coef_C: Tensor, level: int) -> Tensor:
        return self._rows.encode(coef_C[None, :level])[0]

    def decode(self, code_Y: Tensor, level: int) -> Tensor:
        return self._rows.decode(code_Y[None], level)[0]


class _EqualRanks(_EqualRows, _Ranked):
    """The same number of them of all tokens."""


class _RankRows(_Ranked):
    """As many of each token as its gate says, which is noted as uint16."""

    @property
    def mean_bytes(self) -> float:
        return self._rows.mean_row_bytes

    def cheaper(self, level: int) -> int:
        return self._rows.cheaper(level)

    def wanted(self, coef_NC: Tensor, rank_N: Tensor | None) -> list[int]:
        return rank_N.tolist()

    def noted_bytes(self, tokens: int) -> int:
        return RANK_BYTES * tokens

    def note(self, noted_P: Tensor, row: int, level: int) -> None:
        place = RANK_BYTES * row
        noted_P[place], noted_P[place + 1] = level & 255, level >> 8

    def noted(self, noted_P: Tensor, count: int) -> list[int]:
        byte_P = noted_P[: RANK_BYTES * count].int()
        return (byte_P[::2] | byte_P[1::2] << 8).tolist()


def _packed(plan: BitPlan, coef_C: Tensor) -> Tensor:
    return plan.encode(coef_C[None, : plan.num_coefficients])[0][0]


def _unpacked(plan: BitPlan, code_Y: Tensor) -> Tensor:
    code_1Y = code_Y[None]
    return plan.decode(code_1Y, code_1Y[:, :0], plan.num_coefficients, torch.float32)[0]
