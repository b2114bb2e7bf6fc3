"""Project, gate, threshold and pack in one launch against the plain form in fp64."""

import pytest
import torch
from errors import check_near

from lowrank_kv.ops.gated_append.reference import gated_append as reference
from lowrank_kv.ops.gated_append.triton import gated_append
from lowrank_kv.ops.gated_append.weights import append_weights
from lowrank_kv.stores.page_pool import PagePool
from lowrank_kv.stores.paged import PagedStore
from lowrank_kv.stores.quantization import IntegerQuantization
from lowrank_kv.utils.errors import UserError

WIDTH, GRANULE, STEPS = 96, 32, 6


def new_store(batch, *, device, dtype=torch.float16, bits=None) -> PagedStore:
    quantization = None if bits is None else IntegerQuantization(bits=bits)
    pool = PagePool(batch * 20, tokens=16, granule=GRANULE, dtype=dtype, device=device, quantization=quantization)
    return PagedStore(batch, WIDTH, capacity=80, pool=pool)


def weights(generator, dtype):
    basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator)).Q
    gate = torch.randn(WIDTH, WIDTH, generator=generator)
    scale, spread = torch.rand(2, WIDTH, generator=generator) + 0.5
    return append_weights(basis, gate, scale, spread, dtype), torch.randn(WIDTH, generator=generator)


# The interpreter cuts bf16 off instead of rounding it.
rounds_bf16 = pytest.mark.skipif(not torch.cuda.is_available(), reason="bf16 is rounded on a GPU alone")


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.float16, None),
        (torch.float16, 8),
        (torch.float16, 4),
        (torch.bfloat16, None),
        pytest.param(torch.bfloat16, 8, marks=rounds_bf16),
        pytest.param(torch.bfloat16, 4, marks=rounds_bf16),
    ],
)
def test_equals_the_reference(device, generator, dtype, bits):
    batch = 3
    weight, bias = weights(generator, dtype)
    ours, plain = (new_store(batch, device=device, dtype=dtype, bits=bits) for _ in range(2))
    options = {"threshold": 0.3, "granularity": GRANULE}
    # Open tiles to go on with, one of them full but for three rows.
    prompt = torch.randn(batch, 13, WIDTH, generator=generator).to(dtype)
    for store in (ours, plain):
        store.append(prompt.to(device), torch.full((batch, 13), GRANULE, device=device))
    for _ in range(STEPS):
        state = torch.randn(batch, WIDTH, generator=generator).to(dtype)
        ours.pool.reserve(batch * ours.granules)
        gated_append(state.to(device), weight.to(device), bias.to(device), ours, **options)
        reference(state.to(device), weight.to(device), bias.to(device), plain, **options)
    assert ours.length_B.tolist() == [13 + STEPS] * batch
    assert torch.equal(ours.ranks(), plain.ranks())
    assert len(ours.ranks()[:, 13:].unique()) > 1
    for name in ("tiles_B", "tile_granules_BS", "tile_rows_BS", "tile_position_BSN", "open_BK"):
        assert torch.equal(getattr(ours, name), getattr(plain, name)), name
    assert int(ours.pool.free_count) == int(plain.pool.free_count)
    if bits is None:
        check_near(ours.dense(), plain.dense(), dtype)
        return
    # Rounding of the sums may turn a code, or a scale, into its neighbour.
    step = plain.tile_scale_BSN2[..., 0].max().float()
    assert (ours.dense() - plain.dense()).abs().max() <= 1.1 * step
    assert (ours.dense() != plain.dense()).double().mean() < 0.05


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_between_two_codes(device, bits):
    """The step is 1 and the least value 0, so that halves are ties, which the store's own rounding gives to even codes."""
    most = 2**bits - 1
    state_C = (torch.arange(WIDTH) % (most - 1) + 0.5).half()
    state_C[0], state_C[1] = 0.0, most / (1 + 2.0**-8)
    ours, plain = (new_store(1, device=device, bits=bits) for _ in range(2))
    weight_CX = torch.cat([torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)], dim=1).half().to(device)
    bias_C = torch.zeros(WIDTH, device=device)
    ours.pool.reserve(ours.granules)
    for append, store in ((gated_append, ours), (reference, plain)):
        append(state_C[None].to(device), weight_CX, bias_C, store, threshold=0.0, granularity=GRANULE)
    assert ours.ranks().tolist() == [[WIDTH]]
    assert torch.equal(ours.dense(), plain.dense())


def test_pages_are_each_taken_once_by_many_sequences(device, generator):
    batch = 35
    weight, bias = weights(generator, torch.float16)
    store = new_store(batch, device=device)
    for _ in range(2):
        store.pool.reserve(batch * store.granules)
        state = torch.randn(batch, WIDTH, generator=generator).half()
        gated_append(state.to(device), weight.to(device), bias.to(device), store, threshold=0.3, granularity=GRANULE)
    granule = torch.arange(store.granules, device=device)
    taken = store.tile_page_BSK[granule < store.tile_granules_BS[..., None]].tolist()
    free = store.pool.free_P[: int(store.pool.free_count)].tolist()
    assert sorted(taken + free) == list(range(store.pool.pages))


def test_coefficients_between_granules_are_refused(device):
    with pytest.raises(UserError, match="`granularity` must be a multiple of the pages' granule, 32; got 8"):
        gated_append(torch.zeros(1, WIDTH), None, None, new_store(1, device=device), threshold=0.1, granularity=8)
