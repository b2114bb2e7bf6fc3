"""The kernels that write a server's pages, launched at the shapes of models of 8 B and of others and compiled for an H100 or
H200 without one.

Shared memory must suffice and registers must not spill. A launch is recorded on meta tensors, so that nothing in it can have
waited for the device.
"""

import re

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")
from compiled_kernels import META, Launches, check_all, compiled  # noqa: E402
from even_levels import LEVELS  # noqa: E402

from lowrank_kv.ops.arena_append.triton import PageWriter  # noqa: E402
from lowrank_kv.ops.native.pages import NewTokens  # noqa: E402
from lowrank_kv.stores.arena import PageLayout  # noqa: E402
from lowrank_kv.stores.bit_plan import BitPlan  # noqa: E402
from lowrank_kv.stores.importance_gate import ImportanceGate  # noqa: E402
from lowrank_kv.stores.page_rows import RowFormat  # noqa: E402
from lowrank_kv.stores.quantization import IntegerQuantization  # noqa: E402
from lowrank_kv.stores.ranked_rows import RankedRows  # noqa: E402
from lowrank_kv.stores.token_plans import TokenPlans  # noqa: E402

TOKENS, BLOCK_SIZE, HEAD_DIM = 72, 128, 128
QUANTIZATIONS = {
    "floats": None,
    "int8": IntegerQuantization(bits=8),
    "int4": IntegerQuantization(bits=4),
    "int4 of groups": IntegerQuantization(bits=4, group_size=64),
}


def bit_plan(rank: int) -> BitPlan:
    return BitPlan([16] * 8 + [8] * 8 + [4] * 24 + [3] * (rank // 4) + [1] * (rank - rank // 4 - 40), LEVELS)


def rows_of(kind: str, width: int, granularity: int | None) -> RowFormat:
    if kind == "plan":
        return bit_plan(width * 3 // 8)
    if kind == "classes":
        vector_C = torch.zeros(width)
        gate = ImportanceGate(linear_C=vector_C, square_C=vector_C, rest_3=torch.zeros(3), leading=width // 2)
        plans = tuple(bit_plan(width * part // 8) for part in (2, 3, 4, 8))
        return TokenPlans(gate=gate, bounds_K=torch.arange(3.0), plans=plans, shares=(0.25,) * 4)
    return RankedRows(
        num_coefficients=width,
        granularity=granularity,
        mean_row_bytes=float(width),
        dtype=torch.bfloat16,
        quantization=QUANTIZATIONS[kind],
    )


def launches(kind: str, width: int, granularity: int | None = 16, dtype: torch.dtype = torch.bfloat16) -> Launches:
    rows = rows_of(kind, width, granularity)
    bytes_of_state = width * dtype.itemsize
    layout = PageLayout.of(rows, rows, block_size=BLOCK_SIZE, num_sinks=1, sink_bytes=bytes_of_state, margin=0.03)
    states = torch.empty(TOKENS, width // HEAD_DIM, HEAD_DIM, dtype=dtype, device=META)
    place_T, coef_TC = torch.empty(TOKENS, dtype=torch.int64, device=META), torch.empty(TOKENS, width, device=META)
    with Launches().recorded() as found:
        writer = PageWriter(torch.empty(64, layout.page_bytes, dtype=torch.uint8, device=META), layout)
        writer.write(NewTokens(states, states, place_T, place_T), coef_TC, coef_TC, (place_T, place_T))
    return found


def of_keys(found: Launches) -> Launches:
    """Launches for values, which are the same here, left out."""
    assert len(found.found) % 2 == 0
    keys = Launches()
    keys.found = found.found[: len(found.found) // 2]
    return keys


@pytest.mark.parametrize("width", [256, 1024, 4096])
@pytest.mark.parametrize("kind", ["plan", "classes", *QUANTIZATIONS])
def test_writing_pages(tmp_path, kind, width):
    found = of_keys(launches(kind, width))
    names = ["ask_classes", "place_rows", "pack_planned"] if kind == "classes" else ["place_rows", "pack_ranked"]
    assert [kernel.__name__ for kernel, _, _ in found.found] == (["pack_planned"] if kind == "plan" else names)
    check_all(found, tmp_path)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_writing_rows_of_one_rank(tmp_path, kind):
    check_all(of_keys(launches(kind, 1024, None, torch.float32)), tmp_path)


def test_arithmetic_is_that_of_compiled_c():
    """fp32 is neither approximated nor cut off below the smallest normal number."""
    for kind in ("classes", "int8", "int4"):
        for kernel, values, options in of_keys(launches(kind, 256)).found:
            ptx = compiled(kernel, values, options).asm["ptx"]
            found = re.findall(r"(?:\w+\.(?:approx|full)|(?:add|sub|mul|div|fma|sqrt)\.\S*ftz)\S*\.f32", ptx)
            assert not found, kernel.__name__
            assert kernel.__name__ == "place_rows" or "div.rn.f32" in ptx
