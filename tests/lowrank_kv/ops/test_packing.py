"""Compiled packing writes the bytes, and tells the classes, that torch does."""

import copy

import pytest
import torch
from even_levels import LEVELS
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import threads_of

from lowrank_kv.ops.native import compiled_writer, unsupported_reason
from lowrank_kv.stores.bit_plan import UNCODED, WIDTHS, BitPlan
from lowrank_kv.stores.importance_gate import ImportanceGate
from lowrank_kv.stores.quantization import IntegerQuantization
from lowrank_kv.stores.rows_of_classes import RowsOfClasses, packed_classes, unpacked_classes
from lowrank_kv.stores.token_plans import TokenPlans

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    unsupported_reason(torch.float32, CPU, in_pairs=True) is not None, reason="no C compiler"
)

WIDTH = 40
BITS = st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=WIDTH).map(lambda bits: sorted(bits, reverse=True))


def rows_of(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator) * 2.0 ** torch.randint(-9, 9, (count, 1), generator=generator)


def is_between(plan: BitPlan, row_NC: torch.Tensor) -> torch.Tensor:
    """Rows whose scale, or one of whose coefficients, lies so near the middle of two that the order of a sum may decide."""
    row_NR = row_NC[:, : plan.num_coefficients].double()
    step_N = row_NR.square().mean(dim=1).sqrt().log2() * 8
    found_N = (step_N - step_N.floor() - 0.5).abs() < 1e-4
    unit_NR = row_NR / (step_N.round() / 8).exp2()[:, None]
    for width, places in plan.runs(plan.num_coefficients):
        if width != UNCODED:
            found_N |= ((unit_NR[:, places, None] - plan.thresholds[width]).abs() < 1e-5).any(dim=2).any(dim=1)
        else:  # a number that bfloat16 rounds either way
            found_N |= (unit_NR[:, places].bfloat16() != (unit_NR[:, places] * (1 + 1e-6)).bfloat16()).any(dim=1)
            found_N |= (unit_NR[:, places].bfloat16() != (unit_NR[:, places] * (1 - 1e-6)).bfloat16()).any(dim=1)
    return found_N


@settings(max_examples=60, deadline=None)
@given(bits=BITS, count=st.integers(0, 80), seed=st.integers(0, 999), threads=st.integers(1, 2))
def test_rows_of_one_plan(bits, count, seed, threads):
    plan, row_NC = BitPlan(bits, LEVELS), rows_of(count, seed)
    row_NR = row_NC[:, : len(bits)]
    expected_NY, _ = plan.encode(row_NR)
    with threads_of(threads):
        found_NY, scale_NS = compiled_writer(plan, CPU).encode(row_NR[None])
    assert found_NY.shape == (1, *expected_NY.shape)
    assert scale_NS.shape == (1, count, 0)
    is_equal_N = (found_NY[0] == expected_NY).all(dim=1)
    assert bool((is_equal_N | is_between(plan, row_NC)).all())
    assert count < 20 or is_equal_N.float().mean() > 0.9


@settings(max_examples=60, deadline=None)
@given(
    classes=st.lists(BITS, min_size=1, max_size=4),
    earlier=st.integers(0, 70),
    count=st.integers(1, 80),
    seed=st.integers(0, 999),
    threads=st.integers(1, 2),
)
def test_rows_of_several_classes(classes, earlier, count, seed, threads):
    """Behind others, whose bytes, classes and marks stay."""
    generator = torch.Generator().manual_seed(seed)
    gate = ImportanceGate(
        linear_C=torch.randn(WIDTH, generator=generator),
        square_C=torch.randn(WIDTH, generator=generator),
        rest_3=torch.randn(3, generator=generator),
        leading=WIDTH // 2,
    )
    row_NC = rows_of(count, seed)
    score_N = gate.scores(row_NC)
    bounds_K = torch.linspace(float(score_N.min()), float(score_N.max()), len(classes) + 1)[1:-1].contiguous()
    shares = (1 / len(classes),) * len(classes)
    plans = TokenPlans(
        gate=gate, bounds_K=bounds_K, plans=tuple(BitPlan(bits, LEVELS) for bits in classes), shares=shares
    )
    class_N = plans.classes(row_NC)
    before_N = torch.randint(len(classes), (earlier,), generator=generator)
    size, before = plans.nbytes_of(class_N), plans.nbytes_of(before_N)

    def written(writer):
        """Nothing is written beyond the last row: each buffer has a number more."""
        rows = earlier + count
        buffers = [
            torch.full((num_bytes + 1,), 0xA5, dtype=torch.uint8) for num_bytes in (before + size, -(-rows // 4))
        ]
        buffers.append(torch.full((-(-rows // 32) + 1,), 77, dtype=torch.int32))
        buffers[1][: -(-earlier // 4)] = packed_classes(before_N)
        writer.write(row_NC, class_N, RowsOfClasses(*buffers, earlier, before))
        return buffers

    with threads_of(threads):
        writer = copy.deepcopy(compiled_writer(plans, CPU))
        found_N = writer.classes(row_NC)
        assert writer.nbytes_of(class_N) == size
        stored_Y, *found_places = written(writer)
    expected_stored_Y, *expected_places = written(plans)
    for found, expected in zip(found_places, expected_places, strict=True):
        assert torch.equal(found, expected)
    assert unpacked_classes(found_places[0], earlier + count).tolist() == [*before_N.tolist(), *class_N.tolist()]
    assert torch.equal(stored_Y[:before], expected_stored_Y[:before])
    assert stored_Y[-1] == 0xA5
    byte_Y = stored_Y[before:-1]
    is_tie_N = (score_N[:, None] - bounds_K).abs().le(1e-4 * score_N.abs()[:, None] + 1e-4).any(dim=1)
    assert bool(((found_N == class_N) | is_tie_N).all())
    expected_Y = plans.pack(row_NC, class_N, plans.starts(class_N))
    assert torch.equal(expected_stored_Y[before:-1], expected_Y)
    sizes = plans.size_K[class_N].tolist()
    rows = zip(byte_Y.split(sizes), expected_Y.split(sizes), strict=True)
    for n, (found, expected) in enumerate(rows):
        assert torch.equal(found, expected) or is_between(plans.plans[class_N[n]], row_NC[n : n + 1])[0]


def test_what_there_is_no_compiled_code_for(monkeypatch):
    plan = BitPlan([4, 2], LEVELS)
    assert compiled_writer(None, CPU) is None
    assert compiled_writer(IntegerQuantization(bits=8), CPU) is None
    assert compiled_writer(plan, torch.device("meta")) is None
    monkeypatch.setattr("lowrank_kv.ops.native.packing.library", lambda: None)
    assert compiled_writer(plan, CPU) is None
