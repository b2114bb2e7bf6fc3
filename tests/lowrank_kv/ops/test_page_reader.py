"""Where pages cannot be read by kernels."""

import pytest
import torch
from paged_rows import HEAD_DIM, HEADS, layout_of

pytest.importorskip("triton", minversion="3.6")

from lowrank_kv.ops.arena_attention.page_reader import PageReader  # noqa: E402
from lowrank_kv.utils.errors import UserError  # noqa: E402


def test_pages_on_a_cpu_are_refused():
    layout = layout_of(4)
    page_XY = torch.zeros(2, layout.page_bytes, dtype=torch.uint8)
    with pytest.raises(UserError, match="pages on cpu have no Triton kernels"):
        PageReader(page_XY, layout, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
