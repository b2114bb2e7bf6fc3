"""Decode attention over ragged stores against the fp64 reference."""

import gc
import weakref

import pytest
import torch
from rotations import rotation
from threads import threads_of

from lowrank_kv.ops import ragged_attention as whichever
from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.native.library import library
from lowrank_kv.ops.native.ragged_view import append_few
from lowrank_kv.ops.ragged_attention import RaggedTokens, eager, native, reference
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.stores.quantization import IntegerQuantization
from lowrank_kv.stores.ragged import RaggedStore
from lowrank_kv.utils.errors import UserError

HEADS, GROUPS, HEAD_DIM = 6, 2, 16
WIDTH = GROUPS * HEAD_DIM


def filled_store(tokens: int, generator: torch.Generator, rank: int | None = None) -> RaggedStore:
    store = RaggedStore(WIDTH, dtype=torch.float32, device=torch.device("cpu"))
    ranks = torch.randint(0, WIDTH + 1, (tokens,), generator=generator)
    if rank is not None:
        ranks.fill_(rank)
    # What lies beyond a token's rank must never be read.
    coef = torch.randn(tokens, WIDTH, generator=generator)
    coef[torch.arange(WIDTH) >= ranks[:, None]] = torch.nan
    store.append(coef, ranks)
    return store


@pytest.fixture(params=["eager", "native"])
def operation(request):
    """Both ways to attend: plain torch, and compiled code where there is a compiler."""
    if request.param == "native" and library() is None:
        pytest.skip("there is no C compiler")
    return {"eager": eager, "native": native}[request.param]


def attend(way, query_HQD, keys, values, decoders, *, scaling, softcap=None, sink_H=None, **options) -> torch.Tensor:
    """One sequence's attention, (H, Q, D)."""
    tokens = RaggedTokens(keys, values, **options)
    [output_QHD] = way.ragged_attention(query_HQD[None], [tokens], decoders, Scoring(scaling, softcap, sink_H))
    return output_QHD.transpose(0, 1)


def operands(generator: torch.Generator, dtype: torch.dtype, quantization: IntegerQuantization | None = None):
    """(query, stores, decoders, options) of 700 tokens of every rank."""
    stores = []
    for _ in range(2):
        store = RaggedStore(WIDTH, dtype=dtype, device=torch.device("cpu"), quantization=quantization)
        ranks = torch.randint(0, WIDTH + 1, (700,), generator=generator)
        store.append(torch.randn(700, WIDTH, generator=generator), ranks)
        stores.append(store)
    decoders = Decoders(*(torch.randn(2, WIDTH, WIDTH, generator=generator) / WIDTH**0.5).to(dtype))
    query = torch.randn(HEADS, 1, HEAD_DIM, generator=generator).to(dtype)
    return query, stores, decoders, {"scaling": 0.25, "rotation": rotation(700, HEAD_DIM, generator)}


def test_a_key_that_is_no_number_is_not_passed_over(operation):
    generator = torch.Generator().manual_seed(0)
    keys, values = filled_store(100, generator, rank=WIDTH), filled_store(100, generator, rank=WIDTH)
    [bucket] = keys.buckets()
    bucket.rows()[40, 3] = torch.nan
    query, decoders = (
        torch.randn(HEADS, 1, HEAD_DIM, generator=generator),
        Decoders(*torch.randn(2, WIDTH, WIDTH, generator=generator)),
    )
    options = {"scaling": 100.0, "rotation": rotation(100, HEAD_DIM, generator)}
    assert attend(operation, query, keys, values, decoders, **options).isnan().all()


@pytest.mark.parametrize("head_dim", [8, 24, 32, 64, 128])
@pytest.mark.parametrize("heads_of_a_group", [1, 2, 5, 16])
def test_any_shape_of_heads_equals_the_reference(operation, head_dim, heads_of_a_group):
    generator = torch.Generator().manual_seed(head_dim + heads_of_a_group)
    width = 3 * head_dim
    stores = []
    for _ in range(2):
        stores.append(RaggedStore(width, dtype=torch.float32, device=torch.device("cpu")))
        ranks = torch.randint(0, width + 1, (200,), generator=generator)
        stores[-1].append(torch.randn(200, width, generator=generator), ranks)
    query = torch.randn(3 * heads_of_a_group, 1, head_dim, generator=generator)
    decoders = Decoders(*(torch.randn(2, width, width, generator=generator) / width**0.5))
    options = {"scaling": 0.25, "rotation": rotation(200, head_dim, generator)}
    actual = attend(operation, query, *stores, decoders, **options)
    torch.testing.assert_close(actual, attend(reference, query, *stores, decoders, **options), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rotated", ["pairs", "partial", "function", None])
@pytest.mark.parametrize("rank", [None, 0, 1, WIDTH])
@pytest.mark.parametrize(("tokens", "queries"), [(1, 1), (63, 1), (1000, 1), (3000, 3)])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["", "capped"])
def test_equals_the_reference(operation, tokens, queries, rank, rotated, softcap):
    generator = torch.Generator().manual_seed(tokens)
    keys, values = filled_store(tokens, generator, rank), filled_store(tokens, generator, rank)
    query = torch.randn(HEADS, queries, HEAD_DIM, generator=generator)
    decoders = Decoders(*torch.randn(2, WIDTH, WIDTH, generator=generator))
    mask = None
    if queries > 1:
        mask = torch.arange(tokens) <= torch.arange(tokens - queries, tokens)[:, None]
    arguments = (query, keys, values, decoders)
    options = {"scaling": 0.25, "mask_QT": mask, "softcap": softcap}
    if rotated:
        rotary = 8 if rotated == "partial" else None
        keys_rotation = rotation(tokens, HEAD_DIM, generator, rotary=rotary, pairs=rotated != "function")
        options["rotation"] = keys_rotation
    if operation is native and rotated == "function":
        assert native.unsupported_reason([RaggedTokens(keys, values, options["rotation"])])
        return
    actual = attend(operation, *arguments, **options)
    assert actual.shape == query.shape
    torch.testing.assert_close(actual, attend(reference, *arguments, **options), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rotated", [True, False], ids=["rotated", "plain"])
def test_sinks_take_their_share_of_the_softmax(operation, queries, threads, rotated):
    generator = torch.Generator().manual_seed(queries)
    keys, values = filled_store(300, generator), filled_store(300, generator)
    decoders = Decoders(*torch.randn(2, WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
    query = torch.randn(HEADS, queries, HEAD_DIM, generator=generator)
    options = {"scaling": 0.5, "sink_H": torch.tensor([-200.0, -1.0, 0.0, 2.0, 5.0, 300.0])}
    if rotated:
        options["rotation"] = rotation(300, HEAD_DIM, generator)
    with threads_of(threads):
        actual = attend(operation, query, keys, values, decoders, **options)
    expected = attend(reference, query, keys, values, decoders, **options)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)
    plain = attend(reference, query, keys, values, decoders, **{**options, "sink_H": None})
    assert actual[4].norm() < 0.9 * plain[4].norm()
    assert not actual[5].any()


def test_masked_tokens_have_no_weight():
    generator = torch.Generator().manual_seed(0)
    keys, values = filled_store(40, generator), filled_store(40, generator)
    query = torch.randn(HEADS, 1, HEAD_DIM, generator=generator)
    decoders = Decoders(*torch.randn(2, WIDTH, WIDTH, generator=generator))
    mask = torch.arange(40)[None] >= 15
    hidden = attend(whichever, query, keys, values, decoders, scaling=0.25, mask_QT=mask)
    without = RaggedStore(WIDTH, dtype=torch.float32, device=torch.device("cpu"))
    without_values = RaggedStore(WIDTH, dtype=torch.float32, device=torch.device("cpu"))
    without.append(keys.dense()[15:], keys.ranks()[15:])
    without_values.append(values.dense()[15:], values.ranks()[15:])
    torch.testing.assert_close(hidden, attend(whichever, query, without, without_values, decoders, scaling=0.25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["", "capped"])
@pytest.mark.parametrize("rotated", [True, False], ids=["rotated", "unrotated"])
@pytest.mark.parametrize("way", [eager, native, reference], ids=["eager", "native", "reference"])
def test_a_query_that_may_see_nothing_gets_zero(way, rotated, softcap, dtype):
    if way is native and library() is None:
        pytest.skip("there is no C compiler")
    generator = torch.Generator().manual_seed(5)
    _, stores, decoders, options = operands(generator, dtype)
    query = torch.randn(HEADS, 3, HEAD_DIM, generator=generator).to(dtype)
    mask = torch.rand(3, 700, generator=generator) < 0.7
    mask[1] = False
    options |= {"softcap": softcap, "mask_QT": mask}
    if not rotated:
        options["rotation"] = None
    actual = attend(way, query, *stores, decoders, **options)
    assert not actual[:, 1].any()
    expected = attend(reference, query.double(), *stores, decoders, **options)
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)
    # A query that is no number is not passed over where it sees something.
    actual = attend(way, query * torch.nan, *stores, decoders, **options)
    assert actual[:, ::2].isnan().all()
    if way is eager and torch_reads_beyond_rows(dtype):
        pytest.skip("torch's own products give a row of zeros what is no number in the next one")
    assert not actual[:, 1].any()


def torch_reads_beyond_rows(dtype: torch.dtype) -> bool:
    """Whether torch multiplies one number behind each row of an odd length with zero, as oneDNN does in tile registers."""
    rows = torch.zeros(18, 17, dtype=dtype)
    rows[1] = torch.nan
    return bool((rows @ torch.ones(17, 32, dtype=dtype))[0].isnan().any())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integers_are_read_as_they_are_held(operation, bits, group, dtype):
    generator = torch.Generator().manual_seed(2)
    query, stores, decoders, options = operands(generator, dtype, IntegerQuantization(bits=bits, group_size=group))
    actual = attend(operation, query, *stores, decoders, **options)
    expected = attend(reference, query.double(), *stores, decoders, **options)
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


def test_positions_move_the_rotation(operation):
    """Rows that stand for other tokens than their number says are rotated as those."""
    generator = torch.Generator().manual_seed(3)
    keys, values = filled_store(200, generator), filled_store(200, generator)
    query = torch.randn(HEADS, 1, HEAD_DIM, generator=generator)
    decoders = Decoders(*torch.randn(2, WIDTH, WIDTH, generator=generator))
    place = torch.randperm(900, generator=generator)[:200].sort().values
    options = {"scaling": 0.25, "rotation": rotation(900, HEAD_DIM, generator), "position_T": place}
    actual = attend(operation, query, keys, values, decoders, **options)
    expected = attend(reference, query, keys, values, decoders, **options)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


def test_equal_inputs_give_equal_bits(operation):
    generator = torch.Generator().manual_seed(4)
    keys, values = filled_store(5000, generator), filled_store(5000, generator)
    query = torch.randn(HEADS, 1, HEAD_DIM, generator=generator)
    decoders = Decoders(*torch.randn(2, WIDTH, WIDTH, generator=generator))
    options = {"scaling": 0.25, "rotation": rotation(5000, HEAD_DIM, generator)}
    first, *others = [attend(operation, query, keys, values, decoders, **options) for _ in range(5)]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["", "capped"])
@pytest.mark.parametrize("rotated", [True, False], ids=["rotated", "unrotated"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "bits", "allowed"),
    [(torch.float32, None, 1e-5), (torch.float32, 8, 1e-5), (torch.bfloat16, None, 1e-2), (torch.bfloat16, 4, 1e-2)],
)
def test_each_sequence_of_a_batch_is_attended_alone(operation, dtype, bits, allowed, queries, rotated, softcap):
    generator = torch.Generator().manual_seed(6)
    quantization = IntegerQuantization(bits=bits) if bits else None
    decoders = Decoders(*(torch.randn(2, WIDTH, WIDTH, generator=generator) / WIDTH**0.5).to(dtype))
    query = (
        torch.randn(4, queries, HEADS, HEAD_DIM, generator=generator).to(dtype).transpose(1, 2)
    )  # as a model has them
    sequences = []
    for b, tokens in enumerate((1, 90, 90, 700)):
        options = {}
        if rotated:
            options["rotation"] = rotation(2 * tokens, HEAD_DIM, generator)
        if b == 2:
            options["position_T"] = torch.arange(tokens) * 2
            options["mask_QT"] = torch.rand(queries, tokens, generator=generator) < 0.7
        pair = [RaggedStore(WIDTH, dtype=dtype, device=query.device, quantization=quantization) for _ in range(2)]
        for store in pair:
            coef = torch.randn(tokens, WIDTH, generator=generator)
            store.append(coef, torch.randint(0, WIDTH + 1, (tokens,), generator=generator))
        sequences.append(RaggedTokens(*pair, **options))
    actual = operation.ragged_attention(query, sequences, decoders, Scoring(0.25, softcap))
    assert actual.is_contiguous()
    assert actual.shape == (4, queries, HEADS, HEAD_DIM)
    expected = reference.ragged_attention(query.double(), sequences, decoders, Scoring(0.25, softcap))
    error = (actual.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert (error < allowed).all()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_each_query_needs_a_sequence(count):
    generator = torch.Generator().manual_seed(7)
    query, stores, decoders, options = operands(generator, torch.float32)
    tokens = RaggedTokens(*stores, options["rotation"])
    with pytest.raises(UserError, match=f"`sequences` are {count}, but `query_BHQD` has queries of 2"):
        whichever.ragged_attention(torch.stack([query, query]), [tokens] * count, decoders, Scoring(0.25))


@pytest.mark.parametrize("rotated", [True, False], ids=["rotated", "unrotated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_autocast_changes_nothing_but_precision(operation, dtype, rotated):
    """Under it a product of fp32 matrices is in bf16."""
    generator = torch.Generator().manual_seed(8)
    query, stores, decoders, options = operands(generator, dtype)
    if not rotated:
        options["rotation"] = None
    with torch.autocast("cpu", torch.bfloat16):
        actual = attend(operation, query, *stores, decoders, **options)
    expected = attend(reference, query.double(), *stores, decoders, **options)
    assert (actual.double() - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("bits", [None, 8])
def test_rows_that_are_appended_or_cropped_between_attentions_are_read(operation, bits):
    generator = torch.Generator().manual_seed(0)
    quantization = None if bits is None else IntegerQuantization(bits=bits)
    stores = [
        RaggedStore(WIDTH, dtype=torch.float32, device=torch.device("cpu"), quantization=quantization) for _ in range(2)
    ]
    decoders = Decoders(*torch.randn(2, WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
    for step in range(60):
        for store in stores:
            ranks = torch.randint(0, 4, (1 + step % 2,), generator=generator) * 8
            append_few(store, torch.randn(len(ranks), WIDTH, generator=generator), ranks.tolist())
        if step % 20 == 19:
            for store in stores:
                store.crop(store.length // 3)
        query = torch.randn(HEADS, 1, HEAD_DIM, generator=generator)
        options = {"scaling": 0.25, "rotation": rotation(stores[0].length, HEAD_DIM, generator)}
        actual = attend(operation, query, *stores, decoders, **options)
        expected = attend(reference, query, *stores, decoders, **options)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rising", [True, False], ids=["rising", "mixed"])
@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("tokens", [1, 5, 700])
def test_threads_divide_the_tokens_among_them(threads, tokens, rising):
    """Each its share of the places, however the ranks lie in them."""
    if library() is None:
        pytest.skip("there is no C compiler")
    generator = torch.Generator().manual_seed(tokens)
    stores = []
    for step in (1, 7):
        ranks = torch.arange(tokens) * WIDTH // (step * tokens)
        if not rising:
            ranks = ranks[torch.randperm(tokens, generator=generator)]
        stores.append(RaggedStore(WIDTH, dtype=torch.float32, device=torch.device("cpu")))
        stores[-1].append(torch.randn(tokens, WIDTH, generator=generator), ranks)
    query = torch.randn(HEADS, 1, HEAD_DIM, generator=generator)
    decoders = Decoders(*torch.randn(2, WIDTH, WIDTH, generator=generator))
    options = {"scaling": 0.25, "rotation": rotation(tokens, HEAD_DIM, generator)}
    options["mask_QT"] = torch.rand(1, tokens, generator=generator) < 0.7
    with threads_of(threads):
        actual = attend(native, query, *stores, decoders, **options)
    torch.testing.assert_close(actual, attend(reference, query, *stores, decoders, **options), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("head_dim", [16, 64], ids=["in memory", "in registers"])
def test_stretches_of_a_long_text_share_a_softmax(head_dim, threads):
    """Scores rise all along the text, so that what is summed of one stretch is scaled anew by the next; some queries see
    nothing of whole stretches, one of them nothing at all."""
    if library() is None:
        pytest.skip("there is no C compiler")
    generator = torch.Generator().manual_seed(head_dim)
    tokens, width = 6_000, 4 * head_dim
    stores = []
    for least in (0, width - 8):
        coef = torch.randn(tokens, width, generator=generator) * torch.linspace(0.1, 3, tokens)[:, None]
        ranks = torch.randint(least, width + 1, (tokens,), generator=generator)
        stores.append(RaggedStore(width, dtype=torch.float32, device=torch.device("cpu")))
        stores[-1].append(coef, ranks)
    query = torch.randn(12, 5, head_dim, generator=generator)
    decoders = Decoders(*(torch.randn(2, width, width, generator=generator) / width**0.5))
    place = torch.arange(tokens)
    seen = [place >= 0, place < 900, place >= 2_100, (place < 900) | (place >= 5_500), place < 0]
    options = {"scaling": 0.5, "rotation": rotation(tokens, head_dim, generator), "mask_QT": torch.stack(seen)}
    with threads_of(threads):
        actual = attend(native, query, *stores, decoders, **options)
    expected = attend(reference, query.double(), *stores, decoders, **options)
    assert not actual[:, 4].any()
    for one in range(4):
        assert (actual[:, one].double() - expected[:, one]).norm() / expected[:, one].norm() < 1e-5


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_half_precision_is_near_the_reference(dtype, allowed):
    generator = torch.Generator().manual_seed(1)
    query, stores, decoders, options = operands(generator, dtype)
    actual = attend(whichever, query, *stores, decoders, **options)
    assert actual.dtype == dtype
    expected = attend(reference, query.double(), *stores, decoders, **options)
    assert (actual.double() - expected).norm() / expected.norm() < allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoders_do_not_outlive_those_who_hold_them(dtype):
    """A copy in the form that compiled code reads is kept with the decoder, and may be the decoder itself."""
    decoders = Decoders(torch.eye(64, dtype=dtype), torch.eye(64, dtype=dtype))
    decoders.compiled()
    held = [weakref.ref(decoders.key_CC), weakref.ref(decoders.value_CC)]
    del decoders
    gc.collect()
    assert [each() for each in held] == [None, None]
