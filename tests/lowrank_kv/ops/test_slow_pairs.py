"""Scores of pairs that turn slowly, interpolated between positions by compiled code, against the fp64 reference."""

import pytest
import torch
from even_levels import LEVELS
from paged_rows import layout_of
from rotations import rotation_of
from threads import threads_of
from tile_registers import has_tiles, tiles_or_not
from turning_pairs import CLASSES, MODELS, ONE_CLASS, RANK, query_of, table_of, tokens_of
from written_pages import MOST, Written

from lowrank_kv.ops import native
from lowrank_kv.ops.layer_attention import LayerAttention
from lowrank_kv.ops.lowrank_attention import LowRankTokens, Operands, reference
from lowrank_kv.ops.lowrank_attention import native as native_attention
from lowrank_kv.ops.native.page_decoders import PageDecoders
from lowrank_kv.ops.native.pages import NewTokens, Pages, Sequences
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.importance_gate import ImportanceGate
from lowrank_kv.stores.token_plans import TokenPlans
from lowrank_kv.stores.tokenwise import TokenwiseCoefficients

needs_compiler = pytest.mark.skipif(
    native.unsupported_reason(torch.bfloat16, torch.device("cpu"), in_pairs=True) is not None, reason="no C compiler"
)


@pytest.fixture(params=[False, True], ids=["vectors", "tiles"], autouse=True)
def _registers(request):
    """Both kinds of registers that pairs are multiplied in, where there are both."""
    if request.param and not has_tiles():
        pytest.skip("no tile registers, or the system does not give them")
    with tiles_or_not(request.param):
        yield


def interpolates() -> bool:
    return native.multiplies_pairs(torch.bfloat16, 64, 64)


def errors(model: str, tokens: LowRankTokens, queries: int = 1, **scoring) -> tuple[torch.Tensor, float, float]:
    """The attention, and how far it and that without interpolation are from the reference in fp64, relative to its norm."""
    query = query_of(model, queries)
    scoring = Scoring(0.3, **scoring)  # weights differ between tokens
    table = tokens.rotation.table
    plain = tokens._replace(rotation=rotation_of(RotaryTable(table.cos_BTF, table.sin_BTF)))
    expected = reference.lowrank_attention(query.double(), tokens, scoring)
    found, without = (native_attention.lowrank_attention(query, each, scoring) for each in (tokens, plain))
    error, error_without = (float((each.double() - expected).norm() / expected.norm()) for each in (found, without))
    return found, error, error_without


@needs_compiler
@pytest.mark.parametrize("form", [CLASSES, ONE_CLASS], ids=["four classes", "one class"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("count", [1, 90, 150, 700, 2500])
def test_interpolated_scores_are_as_near_to_the_reference(model, count, form):
    table = table_of(model, count + 8)
    _, error, without = errors(model, tokens_of(model, count, form, table))
    assert error < 0.02
    assert error < 1.5 * without + 1e-3


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("count", "are_interpolated"), [(90, False), (150, True), (2500, True)])
def test_pairs_are_interpolated_where_a_thread_has_many_tokens(count, are_interpolated, threads):
    """So that the tests here tell something: results differ in the last bits."""
    if not interpolates():
        pytest.skip("this processor does not multiply pairs of bf16")
    table = table_of("demo", threads * count + 8)
    with threads_of(threads):
        _, error, without = errors("demo", tokens_of("demo", threads * count, CLASSES, table))
    assert (error != without) == are_interpolated


@needs_compiler
@pytest.mark.parametrize("rounds", [True, False], ids=["angles in bf16", "angles in fp32"])
@pytest.mark.parametrize("threads", [1, 3])
def test_far_positions_on_several_threads(rounds, threads):
    table = table_of("demo", 8192, rounds=rounds)
    with threads_of(threads):
        _, error, without = errors("demo", tokens_of("demo", 1500, CLASSES, table, start=6000))
    assert error < 0.02
    assert error < 1.5 * without + 1e-3


@needs_compiler
@pytest.mark.parametrize(("model", "queries"), [("wide heads", 2), ("wide heads", 4), ("wide heads", 5), ("demo", 16)])
def test_several_queries_that_see_some_tokens(model, queries):
    """The last two have more queries for each KV head than share keys in registers."""
    tokens = tokens_of(model, 600, CLASSES, table_of(model, 608), queries=queries)
    _, error, _ = errors(model, tokens, queries=queries, softcap=5.0)
    assert error < 0.02


@needs_compiler
def test_many_queries_find_what_each_finds_alone():
    """As near as sums in another order are: numbers are rounded to bf16 for one query and for many. None is interpolated."""
    table = table_of("demo", 1508)
    tokens = tokens_of("demo", 1500, CLASSES, RotaryTable(table.cos_BTF, table.sin_BTF))
    together, error, without = errors("demo", tokens._replace(rotation=rotation_of(table)), queries=16)
    assert error == without
    query_HQD = query_of("demo", 16)
    for i in range(16):
        alone = native_attention.lowrank_attention(query_HQD[:, i : i + 1].contiguous(), tokens, Scoring(0.3))
        assert (together[:, i : i + 1].float() - alone.float()).norm() < 1e-3 * alone.float().norm()


@needs_compiler
def test_scattered_positions_are_not_interpolated():
    table = table_of("demo", 9000)
    tokens = tokens_of("demo", 600, ONE_CLASS, table)
    position_T = torch.randperm(9000, generator=torch.Generator().manual_seed(0))[:600].sort().values
    _, error, without = errors("demo", tokens._replace(positions=position_T))
    assert error == without < 0.02


@needs_compiler
def test_fp32_is_not_interpolated():
    table = table_of("demo", 700)
    generator = torch.Generator().manual_seed(0)
    found = []
    for each in (table, RotaryTable(table.cos_BTF, table.sin_BTF)):
        generator.manual_seed(0)
        operands = []
        for _ in range(2):
            coef = TokenwiseCoefficients(_one_plan(), dtype=torch.float32, device=torch.device("cpu"))
            coef.append(torch.randn(1, 600, RANK, generator=generator))
            basis = torch.randn(1, 192, coef.rank, generator=generator)
            operands.append(Operands(coef, basis, GrowingTensor(torch.randn(3, 3, 64, generator=generator), dim=1)))
        tokens = LowRankTokens(*operands, rotation_of(each), slice(4, 604))
        query = torch.randn(9, 1, 64, generator=generator)
        found.append(native_attention.lowrank_attention(query, tokens, Scoring(0.1)))
    assert torch.equal(*found)


def _one_plan() -> TokenPlans:
    gate = ImportanceGate(linear_C=torch.zeros(RANK), square_C=torch.zeros(RANK), rest_3=torch.zeros(3), leading=RANK)
    return TokenPlans(gate=gate, bounds_K=torch.zeros(0), plans=(BitPlan(ONE_CLASS[0][0], LEVELS),), shares=(1.0,))


@needs_compiler
@pytest.mark.parametrize(("classes", "new"), [(1, 1), (4, 1), (4, 6)])
def test_pages_are_interpolated_too(classes, new):
    """Pages of 32 coefficients, read as keys and values of wider heads; keys that more than 16 queries share are rebuilt."""
    head_dim, groups, _, _ = MODELS["demo"]
    groups, heads, lengths = 3, 9, [500, 200]
    tokens = Written(layout_of(classes, num_sinks=0, itemsize=2), lengths, torch.bfloat16)
    tokens.write_all()
    pages = Pages(
        tokens.page_XY, tokens.layout, num_kv_heads=groups, head_dim=head_dim, dtype=torch.bfloat16, most_tokens=MOST
    )
    generator = torch.Generator().manual_seed(3)
    decoders = [
        (torch.randn(side.row_format.num_coefficients, groups * head_dim, generator=generator) / 6).bfloat16()
        for side in (tokens.layout.keys, tokens.layout.values)
    ]
    table = table_of("demo", MOST)
    query_THD = torch.randn(2 * new, heads, head_dim, generator=generator).bfloat16()
    none = torch.zeros(2 * new, groups, head_dim, dtype=torch.bfloat16)
    found = []
    for slow_from in (table.slow_from, None):
        output_THD = torch.empty(2 * new, heads, head_dim)
        pages.attend(
            query_THD,
            NewTokens(none, none, torch.empty(0), torch.empty(0)),
            Sequences(torch.tensor([0, new, 2 * new]).int(), torch.tensor(lengths).int(), tokens.page_BP),
            torch.arange(2),
            LayerAttention(
                PageDecoders(*decoders, head_dim=head_dim),
                RotaryTable(table.cos_BTF, table.sin_BTF, slow_from),
                Scoring(0.1),
                sees_itself=False,
            ),
            output_THD,
        )
        found.append(output_THD)
    assert torch.equal(*found) != (interpolates() and new == 1)
    for b, length in enumerate(lengths):
        key_NGD, value_NGD = (
            (tokens.rows(which, b, length).double() @ decoders[which].double()).unflatten(1, (groups, head_dim))
            for which in range(2)
        )
        key_GND = rotation_of(table).rotate(key_NGD.transpose(0, 1), slice(0, length)).repeat_interleave(3, dim=0)
        own = slice(b * new, (b + 1) * new)
        weight_THN = (torch.einsum("thd,hnd->thn", query_THD[own].double(), key_GND) * 0.1).softmax(-1)
        value_GND = value_NGD.transpose(0, 1).repeat_interleave(3, dim=0)
        expected_THD = torch.einsum("thn,hnd->thd", weight_THN, value_GND)
        for output_THD in found:
            assert (output_THD[own] - expected_THD).norm() < 0.02 * expected_THD.norm()


def test_slow_pairs_are_those_behind_the_last_fast_one():
    assert native.slow_from(torch.tensor([1.0, 0.1, 0.001, -0.0001])) == 2
    assert native.slow_from(torch.tensor([1.0, 0.001, -0.1, 0.001])) == 3
    assert native.slow_from(torch.tensor([0.001])) == 0
    assert native.slow_from(torch.tensor([1.0])) == 1
