"""Rows of several sizes: what is stored, found again, cropped and kept, and what compiled code reads of it."""

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import calibration_of, tiny_model
from planned_tokens import token_plans_of
from rotations import rotated_tokens

from lowrank_kv.calibration.bit_plans import coded_bases
from lowrank_kv.calibration.token_gates import fit_gate, token_costs
from lowrank_kv.ops import native
from lowrank_kv.ops.lowrank_attention import Operands, eager, reference
from lowrank_kv.ops.lowrank_attention import native as native_attention
from lowrank_kv.ops.native import reading
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.stores.bit_plan import WIDTHS
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.rows_of_classes import ROWS_BETWEEN_MARKS
from lowrank_kv.stores.token_plans import TokenPlans
from lowrank_kv.stores.tokenwise import TokenwiseCoefficients
from lowrank_kv.utils.errors import UserError

WIDTH = 40
RANKS = st.lists(
    st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=WIDTH).map(lambda bits: tuple(sorted(bits, reverse=True))),
    min_size=1,
    max_size=4,
)


def plans_of(classes: list[tuple[int, ...]], seed: int = 0) -> TokenPlans:
    bounds_K = torch.linspace(-1, 1, len(classes) + 1)[1:-1]
    return token_plans_of(classes, bounds_K, WIDTH, torch.Generator().manual_seed(seed))


def rows_of(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator) * 2.0 ** torch.randint(-1, 2, (count, 1), generator=generator)


def filled(plans: TokenPlans, row_NC: torch.Tensor, pieces: list[int]) -> TokenwiseCoefficients:
    coef = TokenwiseCoefficients(plans, dtype=torch.float32, device=torch.device("cpu"))
    for piece in row_NC.split(pieces):
        coef.append(piece[None])
    return coef


def rounded(plans: TokenPlans, row_NC: torch.Tensor) -> torch.Tensor:
    return plans.rounded(row_NC, plans.classes(row_NC))


def check(coef: TokenwiseCoefficients, row_NC: torch.Tensor) -> None:
    plans = coef.quantization
    assert coef.length == len(row_NC)
    torch.testing.assert_close(coef.rows()[0], rounded(plans, row_NC))
    torch.testing.assert_close(reading.rows_of(coef), coef.rows())  # compiled code, where there is some
    class_N = plans.classes(row_NC)
    assert coef.class_of_rows().tolist() == class_N.tolist()
    sizes = torch.tensor([0, *(plans.row_bytes()[k] for k in class_N.tolist())]).cumsum(0)
    assert coef.stored.length == int(sizes[-1])
    assert coef.marks.rows.tolist() == sizes[:-1][::ROWS_BETWEEN_MARKS].tolist()
    assert coef.classes.length == -(-len(row_NC) // 4)


@settings(max_examples=50, deadline=None)
@given(
    classes=RANKS, pieces=st.lists(st.integers(1, 50), min_size=1, max_size=4), seed=st.integers(0, 99), data=st.data()
)
def test_rows_are_found_again_however_they_came_and_whatever_is_taken_away(classes, pieces, seed, data):
    plans, row_NC = plans_of(classes, seed), rows_of(sum(pieces), seed)
    coef = filled(plans, row_NC, pieces)
    check(coef, row_NC)
    start = data.draw(st.integers(0, len(row_NC)))
    torch.testing.assert_close(coef.rows(start)[0], rounded(plans, row_NC)[start:])
    torch.testing.assert_close(reading.rows_of(coef, start), coef.rows(start))
    length = data.draw(st.integers(0, len(row_NC)))
    twin = coef.clone(length)
    check(twin, row_NC[:length])
    twin.append(row_NC[None, length:])
    check(twin, row_NC)
    twin.crop(length)
    check(twin, row_NC[:length])
    twin.append(row_NC[None, :3])
    check(twin, torch.cat([row_NC[:length], row_NC[:3]]))
    chosen_N = torch.rand(len(row_NC), generator=torch.Generator().manual_seed(seed)) < 0.5
    kept_N = chosen_N.nonzero().flatten()
    coef.keep(kept_N[None])
    check(coef, row_NC[kept_N])
    coef.append(row_NC[None, :5])
    check(coef, torch.cat([row_NC[kept_N], row_NC[:5]]))


def test_products_are_those_of_the_rows():
    row_NC = rows_of(3000)
    coef = filled(plans_of([(2,) * 30, (8, 4, 4), (16, 5)]), row_NC, [2990, 10])
    held_NR = coef.rows()[0]
    generator = torch.Generator().manual_seed(0)
    query, weight = torch.randn(1, 3, coef.rank, generator=generator), torch.rand(1, 3, 3000, generator=generator)
    torch.testing.assert_close(coef.dot(query), query @ held_NR.T, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(coef.weighted_sum(weight), weight @ held_NR, atol=1e-2, rtol=1e-4)


def test_two_bits_tell_four_classes():
    with pytest.raises(UserError, match="`plans` must be of 1 to 4 classes"):
        plans_of([(4,)] * 5)


@pytest.mark.skipif(
    native.unsupported_reason(torch.float32, torch.device("cpu"), in_pairs=True) is not None, reason="no C"
)
# Always the same examples: in bf16 a rare one of large scores is a little more than 2 % off.
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    classes=st.tuples(RANKS, RANKS),
    count=st.integers(1, 150),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    head_dim=st.sampled_from([8, 64]),
    seed=st.integers(0, 99),
)
def test_compiled_attention_reads_rows_of_several_classes(classes, count, dtype, head_dim, seed):
    generator, groups, queries = torch.Generator().manual_seed(seed), 2, 2

    def operands(each):
        coef = TokenwiseCoefficients(plans_of(each, seed), dtype=dtype, device=torch.device("cpu"))
        coef.append(rows_of(count, seed)[None])
        basis = torch.randn(1, groups * head_dim, coef.rank, generator=generator) / coef.rank**0.5
        whole = torch.randn(groups, 3, head_dim, generator=generator).to(dtype)
        return Operands(coef, basis.to(dtype), GrowingTensor(whole, dim=1))

    tokens = rotated_tokens(*(operands(each) for each in classes), queries, generator)
    query = torch.randn(6, queries, head_dim, generator=generator).to(dtype)
    assert native_attention.unsupported_reason(tokens) is None
    expected = reference.lowrank_attention(query.double(), tokens, Scoring(0.1))
    allowed = 0.02 if dtype == torch.bfloat16 else 1e-4
    for operation in (eager, native_attention):
        found = operation.lowrank_attention(query, tokens, Scoring(0.1)).double()
        assert (found - expected).norm() <= allowed * expected.norm()


def test_a_gate_finds_the_tokens_that_cost_most():
    """Of tokens whose cost depends on their coefficients, on others than it was fitted to."""
    generator = torch.Generator().manual_seed(0)
    coef_NC = torch.randn(4000, WIDTH, generator=generator)
    size_N = (1.5 * coef_NC[:, 3] + 0.5 * coef_NC[:, 7].square()).exp()
    gradient_NC = torch.randn(4000, WIDTH, generator=generator) * size_N[:, None].sqrt()
    importance_C = torch.linspace(2, 0.5, WIDTH)
    cost_N = token_costs(coef_NC, gradient_NC, importance_C, 1.0)
    gate = fit_gate(coef_NC[:3000], cost_N[:3000], leading=20)
    score_N, cost_N, size_N = gate.scores(coef_NC[3000:]), cost_N[3000:], size_N[3000:]
    assert torch.corrcoef(torch.stack([score_N, size_N.log()]))[0, 1] > 0.9
    first_N = score_N.argsort(descending=True)[:100]
    assert cost_N[first_N].sum() > 0.5 * cost_N.sum(), "a tenth of the tokens has more than half of the cost"


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_classes_take_the_bytes_they_were_given(rate):
    calibration = calibration_of(tiny_model(), read=True)
    coded = [each for sides in coded_bases(calibration, rate, token_classes=4).values() for each in sides.values()]
    full = sum(2 * len(each.encoder_CC) for each in coded)
    taken = sum(each.plan.nbytes(each.plan.num_coefficients) for each in coded)
    assert 0.93 * rate * full <= taken <= rate * full
    for each in coded:
        sizes = each.plan.row_bytes()
        assert sum(each.plan.shares) == pytest.approx(1)
        assert sizes[0] <= sizes[-1]


def test_more_bytes_than_a_mark_can_say_are_refused_before_anything_is_written(monkeypatch):
    plans, row_NC = plans_of([(4,) * 10, (8, 4)]), rows_of(90)
    coef = filled(plans, row_NC[:60], [60])
    monkeypatch.setattr("lowrank_kv.stores.tokenwise._MOST_BYTES", coef.stored.length + 10)
    with pytest.raises(UserError, match="take a lower rate"):
        coef.append(row_NC[None, 60:])
    check(coef, row_NC[:60])


def test_a_view_does_not_keep_buffers_that_were_left():
    coef = filled(plans_of([(4, 4), (2,)]), rows_of(5), [5])
    coef.native_view = object()
    coef.append(rows_of(40)[None])
    assert coef.native_view is None


@pytest.mark.skipif(
    native.unsupported_reason(torch.float32, torch.device("cpu"), in_pairs=True) is not None, reason="no C"
)
@pytest.mark.parametrize("which", ["stored", "classes", "marks"])
def test_a_view_is_made_again_where_buffers_have_moved(which):
    coef = filled(plans_of([(4, 4), (2,)]), rows_of(40), [40])
    view = reading.coefficients_view(coef)
    assert reading.coefficients_view(coef) is view
    held = getattr(coef, which)
    held.reserve(held.capacity + 1)
    assert reading.coefficients_view(coef) is not view


def test_room_for_rows_of_unknown_classes_is_refused():
    """A number of rows would be taken for one of bytes."""
    coef = filled(plans_of([(4, 4), (2,)]), rows_of(5), [5])
    with pytest.raises(NotImplementedError):
        coef.reserve(9)


@pytest.mark.parametrize("which", ["stored", "classes", "marks"])
def test_rows_that_are_cut_short_leave_none(which, monkeypatch):
    plans, row_NC = plans_of([(4, 4), (2,)]), rows_of(50)
    coef, expected = filled(plans, row_NC, [5, 45]), filled(plans, row_NC, [5, 45])
    coef.crop(5)
    with monkeypatch.context() as patch:
        patch.setattr(getattr(coef, which), "make_room", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            coef.append(row_NC[None, 5:])
    coef.append(row_NC[None, 5:])
    assert torch.equal(coef.rows(), expected.rows())
    for name in ("stored", "classes", "marks"):
        assert torch.equal(getattr(coef, name).rows, getattr(expected, name).rows)
