"""Decode attention over low-rank and full-rank tokens against the fp64 reference."""

import pytest
import torch
from rotations import rotation
from threads import threads_of

from lowrank_kv.ops import lowrank_attention as whichever
from lowrank_kv.ops.lowrank_attention import LowRankTokens, Operands, eager, native, reference
from lowrank_kv.ops.native.library import library
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.growable_tensor import GrowingTensor

HEADS, GROUPS, HEAD_DIM = 6, 2, 16


def operands(low: int, full: int, rank: int, *, joint: bool, generator: torch.Generator) -> Operands:
    parts, width = (1, GROUPS * HEAD_DIM) if joint else (GROUPS, HEAD_DIM)
    return Operands(
        Coefficients.from_rows(torch.randn(parts, low, rank, generator=generator)),
        torch.linalg.qr(torch.randn(parts, width, width, generator=generator)).Q[:, :, :rank],
        GrowingTensor(torch.randn(GROUPS, full, HEAD_DIM, generator=generator), dim=1),
    )


def attend(way, query_HQD, keys, values, *, scaling, softcap=None, sink_H=None, **options) -> torch.Tensor:
    tokens = LowRankTokens(keys, values, **options)
    return way.lowrank_attention(query_HQD, tokens, Scoring(scaling, softcap, sink_H))


@pytest.fixture(params=["eager", "native"])
def operation(request):
    """Both ways to attend: plain torch, and compiled code where there is a compiler."""
    if request.param == "native" and library() is None:
        pytest.skip("there is no C compiler")
    return {"eager": eager, "native": native}[request.param]


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "per_head"])
@pytest.mark.parametrize("rotated", ["pairs", "function", None])
@pytest.mark.parametrize(("low", "full"), [(0, 5), (7, 0), (60, 3), (2500, 40)])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("softcap", [None, 0.7], ids=["", "capped"])
def test_equals_the_reference(operation, low, full, queries, joint, rotated, softcap):
    generator = torch.Generator().manual_seed(low)
    keys = operands(low, full, 5, joint=joint, generator=generator)
    values = operands(low, full, 9, joint=joint, generator=generator)
    query = torch.randn(HEADS, queries, HEAD_DIM, generator=generator)
    options = {"scaling": 0.25, "softcap": softcap}
    if rotated:
        positions = torch.randperm(low + full, generator=generator)[:low].sort().values
        keys_rotation = rotation(low + full, HEAD_DIM, generator, pairs=rotated == "pairs")
        options |= {"rotation": keys_rotation, "positions": positions}
    if queries > 1:
        mask = torch.rand(queries, low + full, generator=generator) < 0.7
        mask[1] = False
        options["mask_QT"] = mask
    if operation is native and (not low or rotated == "function"):
        tokens = {name: value for name, value in options.items() if name not in ("scaling", "softcap")}
        assert native.unsupported_reason(LowRankTokens(keys, values, **tokens))
        return
    actual = attend(operation, query, keys, values, **options)
    assert actual.shape == query.shape
    torch.testing.assert_close(actual, attend(reference, query, keys, values, **options), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "per_head"])
@pytest.mark.parametrize("seen", [1.0, 0.6], ids=["all", "masked"])
@pytest.mark.parametrize("threads", [1, 3])
def test_sinks_take_their_share_of_the_softmax(operation, joint, seen, threads):
    """The reference is one softmax in fp64. A very low sink takes nothing, a very high one all; some queries see nothing."""
    generator = torch.Generator().manual_seed(3)
    keys, values = (operands(200, 5, rank, joint=joint, generator=generator) for rank in (5, 9))
    query = torch.randn(HEADS, 3, HEAD_DIM, generator=generator)
    mask = torch.rand(3, 205, generator=generator) <= seen
    mask[1] &= seen == 1
    sink_H = torch.tensor([-200.0, -1.0, 0.0, 2.0, 5.0, 300.0])
    options = {"scaling": 0.25, "mask_QT": mask, "sink_H": sink_H}
    with threads_of(threads):
        actual = attend(operation, query, keys, values, **options)
    torch.testing.assert_close(actual, attend(reference, query, keys, values, **options), atol=2e-4, rtol=2e-4)
    plain = attend(reference, query, keys, values, **{**options, "sink_H": None})
    torch.testing.assert_close(actual[0], plain[0], atol=2e-4, rtol=2e-4)
    assert not actual[5].any()
    assert actual[4].norm() < 0.8 * plain[4].norm()


def in_dtype(held: Operands, dtype: torch.dtype) -> Operands:
    full = GrowingTensor(held.full_GFD.to(dtype), dim=1)
    return Operands(Coefficients.from_rows(held.coef.rows().to(dtype)), held.basis_PWR.to(dtype), full)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("joint", [True, False], ids=["joint", "per_head"])
@pytest.mark.parametrize("way", [eager, native, reference], ids=["eager", "native", "reference"])
def test_a_query_that_may_see_nothing_gets_zero(way, joint, dtype):
    if way is native and library() is None:
        pytest.skip("there is no C compiler")
    generator = torch.Generator().manual_seed(7)
    keys, values = (in_dtype(operands(60, 3, rank, joint=joint, generator=generator), dtype) for rank in (5, 9))
    query = torch.randn(HEADS, 3, HEAD_DIM, generator=generator).to(dtype)
    mask = torch.rand(3, 63, generator=generator) < 0.7
    mask[1] = False
    options = {
        "scaling": 0.25,
        "rotation": rotation(63, HEAD_DIM, generator),
        "positions": slice(0, 60),
        "mask_QT": mask,
    }
    actual = attend(way, query, keys, values, **options)
    assert not actual[:, 1].any()
    expected = attend(reference, query.double(), keys, values, **options)
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)
    # A query that is no number is not passed over where it sees something.
    actual = attend(way, query * torch.nan, keys, values, **options)
    assert not actual[:, 1].any()
    assert actual[:, ::2].isnan().all()


@pytest.mark.parametrize("way", [eager, reference], ids=["eager", "reference"])
def test_a_head_that_may_see_nothing_gets_zero(way):
    """Where every head holds tokens of its own, so that they have masks of their own."""
    generator = torch.Generator().manual_seed(8)
    keys, values = (operands(60, 3, rank, joint=False, generator=generator) for rank in (5, 9))
    query = torch.randn(HEADS, 1, HEAD_DIM, generator=generator)
    mask = torch.rand(HEADS, 1, 63, generator=generator) < 0.7
    mask[4] = False
    actual = attend(way, query, keys, values, scaling=0.25, mask_QT=mask)
    assert actual.flatten(1).any(dim=1).tolist() == [True] * 4 + [False, True]


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "per_head"])
def test_threads_share_low_rank_and_whole_tokens(joint):
    if library() is None:
        pytest.skip("there is no C compiler")
    generator = torch.Generator().manual_seed(3)
    keys, values = (operands(60, 3, rank, joint=joint, generator=generator) for rank in (5, 9))
    query = torch.randn(HEADS, 2, HEAD_DIM, generator=generator)
    mask = torch.rand(2, 63, generator=generator) < 0.7
    mask[1] = False
    options = {"scaling": 0.25, "mask_QT": mask}
    with threads_of(5):
        actual = attend(native, query, keys, values, **options)
    torch.testing.assert_close(actual, attend(reference, query, keys, values, **options), atol=2e-4, rtol=2e-4)


def test_joint_keys_and_values_of_each_head():
    """Keys and values that are cut into parts differently are attended eagerly."""
    generator = torch.Generator().manual_seed(5)
    keys = operands(60, 3, 5, joint=True, generator=generator)
    values = operands(60, 3, 9, joint=False, generator=generator)
    query = torch.randn(HEADS, 1, HEAD_DIM, generator=generator)
    options = {"scaling": 0.25, "rotation": rotation(63, HEAD_DIM, generator), "positions": slice(0, 60)}
    actual = attend(whichever, query, keys, values, **options)
    torch.testing.assert_close(actual, attend(reference, query, keys, values, **options), atol=2e-4, rtol=2e-4)


def test_the_cap_bounds_scores_before_the_mask():
    """softmax over scores in [-c, c] gives a token e^2c times another's weight at most, and a masked one none."""
    generator = torch.Generator().manual_seed(0)
    keys = operands(30, 10, 5, joint=True, generator=generator)
    # Values that tell the tokens apart: the output is the sum of the weights of low-rank and of full-rank tokens.
    ones = Operands(
        Coefficients.from_rows(torch.zeros(1, 30, 5)),
        keys.basis_PWR,
        GrowingTensor(torch.ones(GROUPS, 10, HEAD_DIM), dim=1),
    )
    query = 100 * torch.randn(HEADS, 1, HEAD_DIM, generator=generator)
    share = attend(whichever, query, keys, ones, scaling=1.0, softcap=1e-4)
    torch.testing.assert_close(share, torch.full_like(share, 10 / 40), atol=1e-4, rtol=0)
    mask = torch.arange(40)[None] < 35
    share = attend(whichever, query, keys, ones, scaling=1.0, softcap=1e-4, mask_QT=mask)
    torch.testing.assert_close(share, torch.full_like(share, 5 / 35), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotated", [True, False])
def test_half_precision_is_near_the_reference(dtype, rotated):
    generator = torch.Generator().manual_seed(1)

    keys, values = (in_dtype(operands(700, 20, 9, joint=True, generator=generator), dtype) for _ in range(2))
    query = torch.randn(HEADS, 1, HEAD_DIM, generator=generator).to(dtype)
    options = {"scaling": 0.25}
    if rotated:
        options |= {"rotation": rotation(720, HEAD_DIM, generator), "positions": slice(5, 705)}
    actual = attend(whichever, query, keys, values, **options)
    assert actual.dtype == dtype
    expected = attend(reference, query.double(), keys, values, **options)
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("rotated", [True, False], ids=["rotated", "unrotated"])
def test_autocast_changes_nothing_but_precision(operation, rotated):
    """Under it a product of fp32 matrices is in bf16."""
    generator = torch.Generator().manual_seed(9)
    keys, values = (operands(60, 3, rank, joint=True, generator=generator) for rank in (5, 9))
    query = torch.randn(HEADS, 1, HEAD_DIM, generator=generator)
    options = {"scaling": 0.25}
    if rotated:
        options |= {"rotation": rotation(63, HEAD_DIM, generator), "positions": torch.arange(60)}
    with torch.autocast("cpu", torch.bfloat16):
        actual = attend(operation, query, keys, values, **options)
    expected = attend(reference, query, keys, values, **options)
    assert (actual - expected).norm() / expected.norm() < 1e-2
