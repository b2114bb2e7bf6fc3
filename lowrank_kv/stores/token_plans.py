"""A plan of bits for each class of tokens, and the gate that says which class a token is in.

Shapes: N tokens, C coefficients, R kept at most, K classes, Y bytes.
"""

import dataclasses
import functools

import torch
from torch import Tensor

from lowrank_kv.stores.bit_plan import BitPlan, laid_out
from lowrank_kv.stores.importance_gate import ImportanceGate
from lowrank_kv.stores.rows_of_classes import CLASSES_PER_BYTE, ROWS_BETWEEN_MARKS, RowsOfClasses
from lowrank_kv.utils.config import require

MOST_CLASSES = 4  # that two bits can tell
MARK_BYTES = 4  # in which a row's first byte is noted
# What a token takes of class and mark.
PLACE_BYTES = 1 / CLASSES_PER_BYTE + MARK_BYTES / ROWS_BETWEEN_MARKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenPlans:
    """How rows of one layer's keys, or values, are packed: finely where the loss asks for it.

    Attributes:
        gate: foretells what a token costs.
        bounds_K: of the scores between classes, rising, (K − 1,) fp32.
        plans: of each class, the least important first.
        shares: of the calibration's tokens, in each class.

    Raises:
        UserError: there are more classes than two bits can tell.
    """

    gate: ImportanceGate
    bounds_K: Tensor
    plans: tuple[BitPlan, ...]
    shares: tuple[float, ...]

    def __post_init__(self):
        require(1 <= len(self.plans) <= MOST_CLASSES, "plans", len(self.plans), f"of 1 to {MOST_CLASSES} classes")

    @property
    def num_coefficients(self) -> int:
        """R, the most that a token has."""
        return max(plan.num_coefficients for plan in self.plans)

    def classes(self, coef_NC: Tensor) -> Tensor:
        """The class of each token, (N,) int64, from all of its coefficients."""
        return torch.bucketize(self.gate.scores(coef_NC), self.bounds_K)

    def row_bytes(self) -> list[int]:
        """Bytes of a row of each class."""
        return [plan.row_bytes(plan.num_coefficients) for plan in self.plans]

    @functools.cached_property
    def size_K(self) -> Tensor:  # noqa: N802 (a tensor's dims are part of its name)
        """:meth:`row_bytes` on the device of the bounds, int32, as kernels read it."""
        return torch.tensor(self.row_bytes(), dtype=torch.int32, device=self.bounds_K.device)

    @functools.cached_property
    def rank_K(self) -> Tensor:  # noqa: N802
        """How many coefficients a row of each class has, on the device of the bounds, int64."""
        return torch.tensor([plan.num_coefficients for plan in self.plans], device=self.bounds_K.device)

    @functools.cached_property
    def _codebooks(self) -> tuple[Tensor, dict[int, int]]:
        levels = {width: level_L for plan in self.plans for width, level_L in plan.levels.items()}
        return laid_out(levels, self.bounds_K.device)

    @property
    def table_L(self) -> Tensor:  # noqa: N802
        """The levels of all plans' codebooks, which agree where plans share a width, and a zero; fp32."""
        return self._codebooks[0]

    @functools.cached_property
    def descriptor_K3R(self) -> Tensor:  # noqa: N802
        """:attr:`BitPlan.descriptor_3R` of each class, in :attr:`table_L`. A coefficient that a class does not keep has an
        empty mask and the level zero."""
        table_L, firsts = self._codebooks
        found = torch.zeros(len(self.plans), 3, self.num_coefficients, dtype=torch.int32, device=table_L.device)
        found[:, 2] = len(table_L) - 1
        for own_3R, plan in zip(found, self.plans, strict=True):
            rank = plan.num_coefficients
            own_3R[:2, :rank] = plan.descriptor_3R[:2]
            own_3R[2, :rank] = torch.tensor([firsts.get(width, -1) for width in plan.bits], device=table_L.device)
        return found

    def starts(self, class_N: Tensor) -> Tensor:
        """The first byte of each row where rows of these classes follow one another, (N,) int64."""
        size_N = self.size_K[class_N]
        return size_N.cumsum(0) - size_N

    def end(self, class_N: Tensor, start_N: Tensor) -> int:
        """Bytes of all rows, of which there is at least one, from where each begins."""
        return int(start_N[-1] + self.size_K[class_N[-1]])

    def pack(self, row_NR: Tensor, class_N: Tensor, start_N: Tensor) -> Tensor:
        """The bytes of rows of these classes, one after another, (Y,) uint8.

        Args:
            row_NR: at least one, of as many coefficients as the plan of any row keeps, or more.
            start_N: as :meth:`starts` says.
        """
        byte_Y = torch.empty(self.end(class_N, start_N), dtype=torch.uint8, device=row_NR.device)
        for k, plan in enumerate(self.plans):
            [place_M] = (class_N == k).nonzero(as_tuple=True)
            code_MY, _ = plan.encode(row_NR[place_M, : plan.num_coefficients])
            byte_Y[start_N[place_M, None] + torch.arange(code_MY.shape[1], device=row_NR.device)] = code_MY
        return byte_Y

    def nbytes_of(self, class_N: Tensor) -> int:
        """Bytes of rows of these classes."""
        return int(self.size_K[class_N].sum())

    def write(self, row_NR: Tensor, class_N: Tensor, into: RowsOfClasses) -> None:
        """Write rows of these classes, as :meth:`pack` takes them, where there is room for them."""
        start_N = self.starts(class_N)
        into.put(self.pack(row_NR, class_N, start_N), class_N, start_N)

    @property
    def mean_row_bytes(self) -> float:
        """Bytes of a row on average, as the calibration's tokens were divided."""
        return sum(share * size for share, size in zip(self.shares, self.row_bytes(), strict=True))

    def nbytes(self, rank: int) -> float:
        """Bytes of a token on average, with what says where its row is."""
        return self.mean_row_bytes + PLACE_BYTES

    def keeps(self, class_N: Tensor) -> Tensor:
        """Whether tokens of these classes keep each of the R coefficients, (N, R) bool."""
        return torch.arange(self.num_coefficients, device=class_N.device) < self.rank_K[class_N][:, None]

    def rounded(self, coef_NC: Tensor, class_N: Tensor) -> Tensor:
        """The coefficients as a store would give them back, (N, R) fp32, zero where a token has none.

        Args:
            class_N: as :meth:`classes` tells it.
        """
        held_NR = coef_NC.new_zeros(len(coef_NC), self.num_coefficients, dtype=torch.float32)
        for k, plan in enumerate(self.plans):
            is_of_class_N, rank = class_N == k, plan.num_coefficients
            held_NR[is_of_class_N, :rank] = plan.rounded(coef_NC[is_of_class_N, :rank])
        return held_NR

    def to(self, device: torch.device) -> "TokenPlans":
        """The same for rows on a device."""
        plans = tuple(plan.to(device) for plan in self.plans)
        return dataclasses.replace(self, gate=self.gate.to(device), bounds_K=self.bounds_K.to(device), plans=plans)
