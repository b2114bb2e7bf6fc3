"""What kernels that write pages read of a side's plans and levels, worked out once.

Shapes: K classes, R coefficients that a row has at most, Y bytes that it has at most, L levels of all codebooks, W rows'
levels.
"""

import dataclasses

import torch
from torch import Tensor

from lowrank_kv.stores.bit_plan import UNCODED, BitPlan
from lowrank_kv.stores.page_rows import PageRows, RowFormat
from lowrank_kv.stores.token_plans import TokenPlans


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTables:
    """How rows are packed by one plan, or by that of their class.

    Attributes:
        rank_K, size_K: coefficients, and bytes, of a row, int32.
        descriptor_K3R: see :attr:`lowrank_kv.stores.bit_plan.BitPlan.descriptor_3R`, int32.
        threshold_L: at the place of each level the middle between it and the next one, fp32.
        first_coef_KY: the first coefficient that has bits in each byte, or in one after it, int32.
        most_in_byte: how many coefficients have bits in one byte at most.
        widest: the most bits of a code of a codebook.
    """

    rank_K: Tensor
    size_K: Tensor
    descriptor_K3R: Tensor
    threshold_L: Tensor
    first_coef_KY: Tensor
    most_in_byte: int
    widest: int

    @classmethod
    def of(cls, row_format: BitPlan | TokenPlans, device: torch.device) -> "PlannedTables":
        """The tables on a device."""
        if isinstance(row_format, TokenPlans):
            plans, table_L, descriptor_K3R = row_format.plans, row_format.table_L, row_format.descriptor_K3R
        else:
            plans, table_L, descriptor_K3R = [row_format], row_format.table_L, row_format.descriptor_3R[None]
        ranks = [plan.num_coefficients for plan in plans]
        sizes = [plan.row_bytes(rank) for plan, rank in zip(plans, ranks, strict=True)]
        first_coef_KY, most_in_byte = torch.zeros(len(plans), max(sizes), dtype=torch.int32, device="cpu"), 1
        for first_coef_Y, plan, size in zip(first_coef_KY, plans, sizes, strict=True):
            bit_Y = torch.arange(size, device="cpu") * 8
            start_R = (plan.byte_R * 8 + plan.shift_R).cpu()
            first_coef_Y[:size] = torch.searchsorted(start_R + torch.tensor(plan.bits, device="cpu"), bit_Y, right=True)
            behind_Y = torch.searchsorted(start_R, bit_Y + 8)
            most_in_byte = max(most_in_byte, int((behind_Y - first_coef_Y[:size]).max()))
        return cls(
            rank_K=torch.tensor(ranks, dtype=torch.int32, device=device),
            size_K=torch.tensor(sizes, dtype=torch.int32, device=device),
            descriptor_K3R=descriptor_K3R.contiguous().to(device),
            threshold_L=((table_L[1:] + table_L[:-1]) / 2).to(device),
            first_coef_KY=first_coef_KY.to(device),
            most_in_byte=most_in_byte,
            widest=max((width for plan in plans for width in plan.bits if width != UNCODED), default=0),
        )


def sizes_of(row_format: RowFormat, rows: PageRows, device: torch.device) -> Tensor:
    """Bytes of a row of each level, (W,) int32, from level 0 on."""
    is_planned = isinstance(row_format, TokenPlans)
    levels = range(len(row_format.plans) if is_planned else row_format.num_coefficients + 1)
    return torch.tensor([rows.size(level) for level in levels], dtype=torch.int32).to(device)
