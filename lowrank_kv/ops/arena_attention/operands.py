"""What kernels read of one layer's pages.

Shapes: X pages, Y bytes, F first tokens that are exact, G KV heads, D head dim, R coefficients.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lowrank_kv.stores.arena import PageLayout, SideLayout
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.token_plans import MARK_BYTES, TokenPlans
from lowrank_kv.utils.config import require


class ArenaSide:
    """Where rows of keys, or of values, are in pages, and how they are packed.

    Args:
        layout: of that part of a page.
        device: of the pages.

    Attributes:
        rank: R.
        bits: of a number: 32, 16, or 8 and 4 of integers; 0 where a plan says.
        differ: whether rows differ in size.
        offsets: places of levels, marks and the first row, and bytes from row to row where they do not differ.
        plan_tensors: descriptor, table of levels and the bytes of each class's rows; None where there is no plan, or are no
            classes.
    """

    def __init__(self, layout: SideLayout, device: torch.device):
        row_format, rows = layout.row_format, layout.rows
        self.rank, self.differ = row_format.num_coefficients, rows.differ
        self.offsets = layout.packed, layout.marks, layout.first_row, 0 if rows.differ else rows.size(rows.least)
        self.plan_tensors: tuple[Tensor | None, ...] = (None, None, None)
        self.bits, self._group_size = 0, 0
        if isinstance(row_format, TokenPlans):
            plans = row_format.to(device)
            self.plan_tensors = plans.descriptor_K3R, plans.table_L, plans.size_K
        elif isinstance(row_format, BitPlan):
            plan = row_format.to(device)
            self.plan_tensors = plan.descriptor_3R, plan.table_L, None
        elif row_format.quantization is None:
            self.bits = 8 * row_format.dtype.itemsize
        else:
            self.bits = row_format.quantization.bits
            self._group_size = row_format.quantization.group_size or 0

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        return {"BITS": self.bits, "GROUP_SIZE": self._group_size, "DIFFER": self.differ}


@dataclasses.dataclass(frozen=True)
class ArenaPages:
    """The pages of one layer.

    Attributes:
        page_XY: uint8, the bytes of a page side by side, and pages a multiple of four bytes apart.
        layout: of each.
        num_kv_heads: G.
        dtype: of exact states, fp32 or bf16.
        keys, values: its parts.
        sink_key_XFGD, sink_value_XFGD: the exact states, rotated keys and values, that each page has if it is its sequence's
            first; they share the pages' memory.

    Raises:
        UserError: pages are smaller than their layout, or their numbers do not lie where a GPU can read them.
    """

    page_XY: Tensor
    layout: PageLayout
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    keys: ArenaSide = dataclasses.field(init=False)
    values: ArenaSide = dataclasses.field(init=False)
    sink_key_XFGD: Tensor = dataclasses.field(init=False)
    sink_value_XFGD: Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        page_XY, needed = self.page_XY, self.layout.page_bytes
        require(page_XY.shape[1] >= needed, "page_XY", page_XY.shape[1], f"of pages of {needed} bytes or more")
        # Marks and floats are read as such, not byte by byte.
        is_aligned = page_XY.data_ptr() % MARK_BYTES == 0 and page_XY.stride(0) % MARK_BYTES == 0
        require(
            is_aligned and page_XY.stride(1) == 1,
            "page_XY",
            f"strides of {page_XY.stride()}",
            f"of pages that are a multiple of {MARK_BYTES} bytes apart and whose bytes lie side by side; a block size that "
            f"is a multiple of {MARK_BYTES} tokens gives these",
        )
        sides = (("key", self.layout.keys), ("value", self.layout.values))
        for name, side in sides:
            object.__setattr__(self, f"{name}s", ArenaSide(side, page_XY.device))
            object.__setattr__(self, f"sink_{name}_XFGD", self._sinks(side))

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self.layout.keys.block_size

    @property
    def num_sinks(self) -> int:
        """F."""
        return self.layout.keys.num_sinks

    def _sinks(self, side: SideLayout) -> Tensor:
        size = self.num_sinks * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        state_XZ = self.page_XY[:, side.sinks : side.sinks + size].view(self.dtype)
        return state_XZ.view(len(state_XZ), self.num_sinks, self.num_kv_heads, self.head_dim)
