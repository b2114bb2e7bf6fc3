"""What decode attention on coefficients of one rank reads.

Shapes: B batch, G parts (the KV heads, or a single one of all their dims), N tokens (room for them), R rank, Y bytes of a
row's codes, D dims of a part.
"""

import dataclasses

import torch
from torch import Tensor

from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.quantization import IntegerQuantization
from lowrank_kv.stores.token_plans import TokenPlans
from lowrank_kv.stores.tokenwise import rows_of_bytes
from lowrank_kv.utils.config import require


@dataclasses.dataclass(frozen=True)
class LatentRows:
    """One layer's keys, or values, as coefficients: row n of part g is ``basis[g] @ coef[g, n]``.

    Attributes:
        row_BGNY: coefficients in the queries' dtype, or codes as uint8, laid out as in
            :class:`lowrank_kv.stores.coefficients.Coefficients`; contiguous in the last dim. Rows are read in wide
            loads where their stride is a multiple of 16.
        basis_BGDR: of each sequence and part; 1 in place of B where all sequences share it.
        scale_BGN2: bf16 step and least value of each row of integers, contiguous in the last dim; None for others.
        quantization: how the rows are held in fewer bits: as integers without groups, by a plan, or by the class of a token.
            The bytes of rows of several classes lie one after another: `row_BGNY` is then (B, 1, Y, 1), room included.
        class_BM, mark_BM: of such rows, as in :class:`lowrank_kv.stores.tokenwise.TokenwiseCoefficients`; None for
            others.

    Raises:
        UserError: the quantization has groups.
    """

    row_BGNY: Tensor
    basis_BGDR: Tensor
    scale_BGN2: Tensor | None = None
    quantization: IntegerQuantization | BitPlan | TokenPlans | None = None
    class_BM: Tensor | None = None
    mark_BM: Tensor | None = None

    def __post_init__(self):
        group = self.quantization.group_size if isinstance(self.quantization, IntegerQuantization) else None
        require(group is None, "group_size", group, "none for this operation: all of a row's codes share one scale")

    @property
    def rank(self) -> int:
        return self.basis_BGDR.shape[-1]

    @property
    def bits(self) -> int:
        """Of an integer; 16 for whatever is held as it is, 0 where a plan says."""
        if self.plan is not None:
            return 0
        return 16 if self.quantization is None else self.quantization.bits

    @property
    def plan(self) -> BitPlan | TokenPlans | None:
        """The plan by which rows are packed; None where there is none."""
        return self.quantization if isinstance(self.quantization, (BitPlan, TokenPlans)) else None

    @property
    def room(self) -> int:
        """N, the tokens that there is room for."""
        return self.row_BGNY.shape[2] if self.class_BM is None else 4 * self.class_BM.shape[1]

    def plan_tensors(self) -> tuple[Tensor | None, ...]:
        """What kernels read of a plan: its descriptor, table, classes, marks and the bytes of each class's rows."""
        if self.plan is None:
            return (None,) * 5
        if isinstance(self.plan, BitPlan):
            return self.plan.descriptor_3R, self.plan.table_L, None, None, None
        return self.plan.descriptor_K3R, self.plan.table_L, self.class_BM, self.mark_BM, self.plan.size_K

    @property
    def numbers(self) -> int:
        """What a row is made of: its coefficients, or the bytes that hold its integers."""
        return self.rank if self.plan is not None else self.row_BGNY.shape[3]

    def rebuilt(self) -> Tensor:
        """All rows at full width, (B, G, N, D) fp64."""
        coef_BGNR = self.row_BGNY
        if isinstance(self.quantization, TokenPlans):
            held = zip(self.row_BGNY.flatten(1), self.class_BM, strict=True)
            coef_BGNR = torch.stack([rows_of_bytes(*each, self.room, self.quantization)[None] for each in held])
        elif self.quantization is not None:
            coef_BGNR = self.quantization.decode(self.row_BGNY, self.scale_BGN2, self.rank, torch.float64)
        return coef_BGNR.double() @ self.basis_BGDR.double().mT
