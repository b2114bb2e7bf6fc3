"""The kernels over a server's pages, launched at the shapes of an 8 B model and compiled for an H100 or H200 without one.

Shared memory must suffice and registers must not spill. A launch is recorded on meta tensors, so that nothing in it can have
waited for the device.
"""

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")
from compiled_kernels import META, Launches, check_all, first_only  # noqa: E402
from even_levels import LEVELS  # noqa: E402

from lowrank_kv.ops.arena_attention.operands import ArenaPages  # noqa: E402
from lowrank_kv.ops.arena_attention.triton import arena_attention  # noqa: E402
from lowrank_kv.ops.arena_attention.triton_rebuild import arena_rows  # noqa: E402
from lowrank_kv.ops.decoders import Decoders  # noqa: E402
from lowrank_kv.ops.rotation import RotaryTable  # noqa: E402
from lowrank_kv.ops.scoring import Scoring  # noqa: E402
from lowrank_kv.stores.arena import PageLayout  # noqa: E402
from lowrank_kv.stores.bit_plan import BitPlan  # noqa: E402
from lowrank_kv.stores.importance_gate import ImportanceGate  # noqa: E402
from lowrank_kv.stores.page_rows import RowFormat  # noqa: E402
from lowrank_kv.stores.quantization import IntegerQuantization  # noqa: E402
from lowrank_kv.stores.ranked_rows import RankedRows  # noqa: E402
from lowrank_kv.stores.token_plans import TokenPlans  # noqa: E402

KINDS = ("plan", "classes", "floats", "ranks", "int8", "int4")
BATCH, POSITIONS, PAGES = 8, 32768, 64


def bit_plan(rank: int) -> BitPlan:
    return BitPlan([16] * 8 + [4] * 24 + [3] * (rank // 4) + [1] * (rank - rank // 4 - 32), LEVELS)


def rows_of(kind: str, rank: int, width: int, dtype: torch.dtype) -> RowFormat:
    if kind == "plan":
        return bit_plan(rank)
    if kind == "classes":
        vector_C = torch.zeros(width)
        gate = ImportanceGate(linear_C=vector_C, square_C=vector_C, rest_3=torch.zeros(3), leading=width)
        plans = tuple(bit_plan(rank * part // 8) for part in (4, 6, 8))
        return TokenPlans(gate=gate, bounds_K=torch.zeros(2), plans=plans, shares=(1 / 3,) * 3)
    integers = {"int8": IntegerQuantization(bits=8), "int4": IntegerQuantization(bits=4, group_size=32)}
    return RankedRows(
        num_coefficients=rank,
        granularity=None if kind == "floats" else 16,
        mean_row_bytes=float(rank),
        dtype=dtype,
        quantization=integers.get(kind),
    )


def launches(
    kind: str,
    *,
    ranks=(380, 650),
    groups=8,
    sharing=4,
    head_dim=128,
    rotary=128,
    dtype=torch.bfloat16,
    softcap=None,
    block_size=128,
) -> Launches:
    width = groups * head_dim
    layout = PageLayout.of(
        *(rows_of(kind, rank, width, dtype) for rank in ranks),
        block_size=block_size,
        num_sinks=1,
        sink_bytes=width * dtype.itemsize,
    )
    page_XY = torch.empty(PAGES, layout.page_bytes, dtype=torch.uint8, device=META)
    pages = ArenaPages(page_XY, layout, groups, head_dim, dtype)
    query_BHD = torch.empty(BATCH, groups * sharing, head_dim, dtype=dtype, device=META)
    state_BGD = torch.empty(BATCH, groups, head_dim, dtype=dtype, device=META)
    page_BP = torch.empty(BATCH, POSITIONS // block_size, dtype=torch.int32, device=META)
    table = torch.empty(1, POSITIONS, rotary // 2, device=META)
    with Launches().recorded() as found:
        output_BHD = arena_attention(
            query_BHD,
            pages,
            page_BP,
            torch.empty(BATCH, dtype=torch.int32, device=META),
            Decoders(*(torch.empty(rank, width, dtype=dtype, device=META) for rank in ranks)),
            Scoring(0.1, softcap),
            rotation=RotaryTable(table, table),
            new_BGD=(state_BGD, state_BGD),
        )
        assert output_BHD.shape == query_BHD.shape
        arena_rows(pages, pages.values, page_BP[0], 1000, dtype)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_rows(tmp_path, kind):
    check_all(launches(kind), tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        {"kind": "classes", "head_dim": 256, "groups": 4, "rotary": 256},
        {"kind": "classes", "head_dim": 64, "groups": 3, "sharing": 3, "rotary": 64, "ranks": (90, 120)},
        {"kind": "plan", "rotary": 64, "softcap": 50.0, "block_size": 16},
        {"kind": "classes", "dtype": torch.float32},
        {"kind": "floats", "dtype": torch.float32},
    ],
    ids=lambda case: " ".join(f"{key} {value}" for key, value in case.items()),
)
def test_other_shapes(tmp_path, case):
    check_all(first_only(launches(**case)), tmp_path)
