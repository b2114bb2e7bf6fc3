"""Every kernel, as the operations launch it at the shapes of an 8 B model, compiled for an H100 or H200 without one.

Shared memory must suffice and registers must not spill.
"""

import re
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")
from compiled_kernels import META, Launches, check_all, compiled, first_only  # noqa: E402

from lowrank_kv.ops.decoders import Decoders  # noqa: E402
from lowrank_kv.ops.full_rank_tokens import FullRankTokens  # noqa: E402
from lowrank_kv.ops.gated_append.triton import gated_append  # noqa: E402
from lowrank_kv.ops.lowrank_attention.joint.triton import joint_attention  # noqa: E402
from lowrank_kv.ops.lowrank_attention.latent_rows import LatentRows  # noqa: E402
from lowrank_kv.ops.lowrank_attention.per_head.triton import latent_attention  # noqa: E402
from lowrank_kv.ops.paged_attention.triton import paged_attention  # noqa: E402
from lowrank_kv.ops.rotation import RotaryTable  # noqa: E402
from lowrank_kv.ops.scoring import Scoring  # noqa: E402
from lowrank_kv.stores.bit_plan import BitPlan  # noqa: E402
from lowrank_kv.stores.page_pool import PagePool  # noqa: E402
from lowrank_kv.stores.paged import PagedStore  # noqa: E402
from lowrank_kv.stores.quantization import IntegerQuantization  # noqa: E402
from lowrank_kv.stores.token_plans import TokenPlans  # noqa: E402


def full_tokens(batch, groups, head_dim, dtype):
    states = torch.empty(batch, groups, 512, head_dim, dtype=dtype, device=META)
    return FullRankTokens(states, states, torch.empty(batch, dtype=torch.int32, device=META))


def paged_launches(
    *,
    heads=32,
    groups=8,
    head_dim=128,
    dtype=torch.bfloat16,
    bits=None,
    rotary=128,
    tokens=64,
    masked=False,
    queries=1,
    softcap=None,
) -> Launches:
    width, batch = groups * head_dim, 8
    quantization = None if bits is None else IntegerQuantization(bits=bits)
    pool = PagePool(64, tokens=tokens, dtype=dtype, device=META, quantization=quantization)
    stores = [PagedStore(batch, width, capacity=32768, pool=pool) for _ in range(2)]
    decoder = torch.empty(width, width, dtype=dtype, device=META)
    query = torch.empty(batch, heads, queries, head_dim, dtype=dtype, device=META)
    options = {"scoring": Scoring(0.1, softcap)}
    if rotary:
        table = torch.empty(1, 32768, rotary // 2, device=META)
        options["rotation"] = RotaryTable(table, table)
    if masked:
        options["mask_BQT"] = torch.empty(batch, queries, 32768, dtype=torch.bool, device=META)
    with Launches().recorded() as launches:
        assert paged_attention(query, *stores, Decoders(decoder, decoder), **options).shape == query.shape
    return launches


def latent_launches(*, rank: int, bits=None, head_dim=128, dtype=torch.bfloat16) -> Launches:
    batch, groups = 8, 8
    basis = torch.empty(batch, groups, head_dim, rank, dtype=dtype, device=META)
    if bits is None:
        rows = LatentRows(torch.empty(batch, groups, 32768, rank, dtype=dtype, device=META), basis)
    else:
        quantization = IntegerQuantization(bits=bits)
        width = quantization.row_bytes(rank)
        codes = torch.empty(batch, groups, 32768, width, dtype=torch.uint8, device=META)
        scales = torch.empty(batch, groups, 32768, 2, dtype=torch.bfloat16, device=META)
        rows = LatentRows(codes, basis, scales, quantization)
    query = torch.empty(batch, 4 * groups, 1, head_dim, dtype=dtype, device=META)
    length = torch.empty(batch, dtype=torch.int32, device=META)
    with Launches().recorded() as launches:
        latent_attention(query, rows, rows, length, Scoring(0.1), full=full_tokens(batch, groups, head_dim, dtype))
    return launches


def joint_launches(
    *,
    key_rank=380,
    value_rank=650,
    bits=None,
    head_dim=128,
    groups=8,
    rotary=128,
    dtype=torch.bfloat16,
    queries=1,
    padded=False,
) -> Launches:
    """As one sequence of an OjaKV cache is attended, at half of the bytes."""
    width, room = groups * head_dim, 32768

    def rows(rank: int) -> LatentRows:
        basis = torch.empty(1, 1, rank, width, dtype=dtype, device=META).mT  # as a QR leaves it
        if bits is None:
            return LatentRows(torch.empty(1, 1, room, rank, dtype=dtype, device=META), basis)
        if bits in ("plan", "classes"):
            levels = {width: torch.zeros(2**width) for width in range(1, 5)}
            plan = BitPlan([16] * 8 + [4] * 24 + [3] * (rank // 4) + [1] * (rank - rank // 4 - 32), levels).to(META)
            if bits == "classes":
                return tokenwise(plan, basis)
            codes = torch.empty(1, 1, room, plan.row_bytes(rank), dtype=torch.uint8, device=META)
            return LatentRows(codes, basis, None, plan)
        quantization = IntegerQuantization(bits=bits)
        codes = torch.empty(1, 1, room, quantization.row_bytes(rank), dtype=torch.uint8, device=META)
        return LatentRows(codes, basis, torch.empty(1, 1, room, 2, dtype=torch.bfloat16, device=META), quantization)

    def tokenwise(plan: BitPlan, basis: torch.Tensor) -> LatentRows:
        codes = torch.empty(1, 1, room * 64, 1, dtype=torch.uint8, device=META)
        classes = torch.empty(1, room // 4, dtype=torch.uint8, device=META)
        marks = torch.empty(1, room // 32, dtype=torch.int32, device=META)
        plans = mock.Mock(spec=TokenPlans, num_coefficients=plan.num_coefficients)
        plans.descriptor_K3R = torch.empty(4, 3, plan.num_coefficients, dtype=torch.int32, device=META)
        plans.table_L, plans.size_K = torch.empty(100, device=META), torch.empty(4, dtype=torch.int32, device=META)
        return LatentRows(codes, basis, None, plans, classes, marks)

    table = torch.empty(1, room, rotary // 2, device=META)
    options = {}
    if padded:
        options["mask_BQN"] = torch.empty(1, queries, room, dtype=torch.bool, device=META)
        options["position_BN"] = torch.empty(1, room, dtype=torch.int32, device=META)
    query = torch.empty(1, 4 * groups, queries, head_dim, dtype=dtype, device=META)
    with Launches().recorded() as launches:
        joint_attention(
            query,
            rows(key_rank),
            rows(value_rank),
            torch.empty(1, dtype=torch.int32, device=META),
            Scoring(0.1, softcap=50.0 if padded else None),
            rotation=RotaryTable(table, table),
            full=full_tokens(1, groups, head_dim, dtype),
            **options,
        )
    return launches


@pytest.mark.parametrize("ranks", [(380, 650), (384, 640)], ids=["any ranks", "multiples of 16"])
@pytest.mark.parametrize("bits", [None, "plan", "classes"])
def test_joint_attention(tmp_path, ranks, bits):
    check_all(joint_launches(key_rank=ranks[0], value_rank=ranks[1], bits=bits), tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        {"padded": True},
        {"bits": 8},
        {"bits": 4},
        {"head_dim": 256, "groups": 4, "rotary": 256},
        {"dtype": torch.float16, "queries": 4},
    ],
    ids=lambda case: " ".join(f"{key} {value}" for key, value in case.items()),
)
def test_joint_attention_of_other_kinds(tmp_path, case):
    check_all(first_only(joint_launches(**case)), tmp_path)


def test_paged_attention(tmp_path):
    check_all(paged_launches(masked=True), tmp_path)


@pytest.mark.parametrize(
    ("name", "stages"),
    [("_rebuilt_scores", 0), ("_weighted_latents", 2)],  # values: positions and scores are a stage apart each
)
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_pages_are_read_ahead(name, stages, bits):
    """The loop over pages leaves later ones under way while it multiplies one: it waits for all but a few reads."""
    found = [launch for launch in paged_launches(bits=bits).found if launch[0].__name__ == name]
    assert found, "a kernel of that name"
    for kernel, values, options in found:
        waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", compiled(kernel, values, options).asm["ptx"])
        assert max(map(int, waits)) >= options["num_stages"] - stages, (options, waits)


@pytest.mark.parametrize(
    "case",
    [
        {"bits": 8},
        {"bits": 4},
        {"rotary": 0},
        {"head_dim": 64, "groups": 3, "heads": 9, "rotary": 64},
        {"head_dim": 96, "groups": 8, "heads": 8, "rotary": 48},
        {"head_dim": 256, "groups": 4, "heads": 8, "rotary": 256},
        {"dtype": torch.float16, "queries": 4},
        {"tokens": 128, "softcap": 50.0},
    ],
    ids=lambda case: " ".join(f"{key} {value}" for key, value in case.items()),
)
def test_paged_attention_of_other_kinds(tmp_path, case):
    check_all(first_only(paged_launches(**case)), tmp_path)


@pytest.mark.parametrize("rank", [80, 128])
def test_latent_attention(tmp_path, rank):
    check_all(latent_launches(rank=rank), tmp_path)


@pytest.mark.parametrize("bits", [8, 4])
def test_latent_attention_on_integers(tmp_path, bits):
    check_all(first_only(latent_launches(rank=64, bits=bits)), tmp_path)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_gated_append(tmp_path, bits):
    width, batch = 1024, 8
    quantization = None if bits is None else IntegerQuantization(bits=bits)
    pool = PagePool(64, dtype=torch.bfloat16, device=META, quantization=quantization)
    store = PagedStore(batch, width, capacity=32768, pool=pool)
    state = torch.empty(batch, width, dtype=torch.bfloat16, device=META)
    weight = torch.empty(width, 2 * width, dtype=torch.bfloat16, device=META)
    with Launches().recorded() as launches:
        gated_append(state, weight, torch.empty(width, device=META), store, threshold=0.1, granularity=64)
    check_all(launches, tmp_path)
