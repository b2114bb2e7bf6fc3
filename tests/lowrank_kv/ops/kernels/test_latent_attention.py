"""Decode attention on per-head coefficients against the fp64 reference."""

import pytest
import torch
from attended_rows import beside, check_equal, latent_rows, moved
from errors import check_near

from lowrank_kv.ops.lowrank_attention.per_head.reference import latent_attention as reference
from lowrank_kv.ops.lowrank_attention.per_head.triton import latent_attention
from lowrank_kv.ops.scoring import Scoring

CASES = {
    "plain": {},
    "int8": {"bits": 8},
    "int4": {"bits": 4},
    "capped, masked": {"softcap": 2.0, "masked": True, "queries": 3},
    "with full tokens": {"full": 37, "masked": True},
    "int4 with full tokens": {"full": 5, "bits": 4, "queries": 2},
    "shared bases, one KV head": {"shared": True, "groups": 1, "heads": 8},
    "many splits": {"splits": 7, "full": 20},
    "sinks": {"sinks": True, "queries": 2},
    "sinks beside full tokens": {"sinks": True, "full": 20, "masked": True},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_reference(device, generator, case):
    check(device, generator, torch.float16, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["with full tokens", "int4"])
def test_other_types(device, generator, dtype, name):
    check(device, generator, dtype, CASES[name])


def check(device, generator, dtype, case):
    case = {"heads": 6, "groups": 2, "queries": 1, "bits": None, "shared": False, "full": 0, "splits": 2} | case
    groups, head_dim, room = case["groups"], 64, 300
    length = torch.tensor([291, 63], dtype=torch.int32)
    shapes = {"room": room, "dtype": dtype, "generator": generator, "bits": case["bits"], "shared": case["shared"]}
    keys = latent_rows(2, groups, length, 21, head_dim, **shapes)
    values = latent_rows(2, groups, length, 43, head_dim, **shapes)
    query = torch.randn(2, case["heads"], case["queries"], head_dim, generator=generator).to(dtype)
    rows = (query, keys, values, length)
    check_equal(latent_attention, reference, rows, device=device, **beside(case, room, groups, query, generator))


@pytest.mark.parametrize(("length", "rank", "head_dim"), [(1, 1, 64), (1000, 128, 128), (64, 256, 256)])
def test_odd_sizes(device, generator, length, rank, head_dim):
    length_B = torch.tensor([length], dtype=torch.int32)
    shape = {"room": length, "dtype": torch.float16, "generator": generator}
    keys, values = (latent_rows(1, 1, length_B, rank, head_dim, **shape) for _ in range(2))
    query = torch.randn(1, 2, 1, head_dim, generator=generator).half()
    actual = latent_attention(
        query.to(device), moved(keys, device), moved(values, device), length_B.to(device), Scoring(0.1)
    )
    check_near(actual.cpu(), reference(query.double(), keys, values, length_B, Scoring(0.1)), torch.float16)


def test_a_query_that_sees_nothing_gets_nothing(device, generator):
    length = torch.tensor([40, 0], dtype=torch.int32)
    shape = {"room": 40, "dtype": torch.float16, "generator": generator}
    keys, values = (latent_rows(2, 2, length, 16, 64, **shape) for _ in range(2))
    query = torch.randn(2, 4, 1, 64, generator=generator).half()
    arguments = (moved(keys, device), moved(values, device), length.to(device))
    actual = latent_attention(query.to(device), *arguments, Scoring(0.25)).cpu()
    assert actual[0].any()
    assert not actual[1].any()
    nothing = torch.zeros(1, 1, 40, dtype=torch.bool, device=device)
    assert not latent_attention(query.to(device), *arguments, Scoring(0.25), mask_BQN=nothing).any()
