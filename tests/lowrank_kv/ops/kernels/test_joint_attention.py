"""Decode attention on joint coefficients of one rank against the fp64 reference."""

import pytest
import torch
import triton
from attended_rows import beside, check_equal, latent_rows, moved, tokenwise_rows
from errors import check_near

from lowrank_kv.ops.lowrank_attention.joint import triton_scores
from lowrank_kv.ops.lowrank_attention.joint.reference import joint_attention as reference
from lowrank_kv.ops.lowrank_attention.joint.triton import joint_attention
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring

CASES = {
    "plain": {},
    "int8": {"bits": 8},
    "int4": {"bits": 4},
    "a plan of bits": {"bits": "plan"},
    "a plan of bits with full tokens": {"bits": "plan", "full": 37, "masked": True, "queries": 3},
    "without rotation": {"rotary": 0},
    "half of a head rotated, at positions": {"rotary": 16, "positions": True},
    "a rotation for each sequence": {"tables": 2},
    "capped, masked": {"softcap": 2.0, "masked": True, "queries": 3},
    "with full tokens": {"full": 37, "masked": True},
    "int4 with full tokens": {"full": 5, "bits": 4, "queries": 2},
    "one KV head": {"groups": 1, "heads": 8},
    "odd head dim, shared bases": {"head_dim": 24, "rotary": 24, "shared": True},
    "many splits": {"splits": 7, "full": 20},
    "sinks": {"sinks": True, "queries": 2},
    "sinks beside full tokens": {"sinks": True, "full": 20, "masked": True},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_reference(device, generator, case):
    check(device, generator, torch.float16, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["with full tokens", "int4", "a plan of bits"])
def test_other_types(device, generator, dtype, name):
    check(device, generator, dtype, CASES[name])


@pytest.mark.parametrize("name", ["plain", "without rotation", "half of a head rotated, at positions", "one KV head"])
def test_several_heads_a_program(device, generator, monkeypatch, name):
    """The interpreter takes the first choice alone, a head a program."""
    chosen = {"BLOCK_N": 64, "BLOCK_Y": 16, "GROUPS_EACH": 2}
    monkeypatch.setattr(triton_scores._joint_scores, "configs", [triton.Config(chosen, num_warps=8, num_stages=3)])
    check(device, generator, torch.float16, CASES[name] | {"groups": CASES[name].get("groups", 3)})


def angles(tables, positions, rotary, generator):
    angle = torch.rand(tables, positions, rotary // 2, generator=generator) * 6
    return torch.polar(torch.ones_like(angle), angle)


def check(device, generator, dtype, case):
    case = {
        "heads": 6, "groups": 2, "head_dim": 32, "queries": 1, "bits": None, "shared": False, "full": 0, "splits": 2,
        "rotary": 32, "tables": 1, "positions": False,
    } | case  # fmt: skip
    room, head_dim = 150, case["head_dim"]
    width = case["groups"] * head_dim
    length = torch.tensor([141, 33], dtype=torch.int32)
    shapes = {"room": room, "dtype": dtype, "generator": generator, "bits": case["bits"], "shared": case["shared"]}
    # More coefficients than a kernel reads at once, and an odd number of them, of which 4 bits leave half a byte.
    keys = latent_rows(2, 1, length, min(width, 19), width, **shapes)
    values = latent_rows(2, 1, length, min(width, 43), width, **shapes)
    query = torch.randn(2, case["heads"], case["queries"], head_dim, generator=generator).to(dtype)
    options = beside(case, room, case["groups"], query, generator)
    if case["rotary"]:
        options["rotation"] = RotaryTable.from_complex(angles(case["tables"], 2 * room, case["rotary"], generator))
    if case["positions"]:
        options["position_BN"] = torch.randint(0, 2 * room, (2, room), generator=generator, dtype=torch.int32)
    check_equal(joint_attention, reference, (query, keys, values, length), device=device, **options)


@pytest.mark.parametrize(("length", "rank", "head_dim"), [(1, 1, 64), (300, 128, 128), (64, 150, 256)])
def test_odd_sizes(device, generator, length, rank, head_dim):
    length_B = torch.tensor([length], dtype=torch.int32)
    shape = {"room": length, "dtype": torch.float16, "generator": generator}
    keys, values = (latent_rows(1, 1, length_B, rank, head_dim, **shape) for _ in range(2))
    rotation = RotaryTable.from_complex(angles(1, length, head_dim, generator))
    query = torch.randn(1, 2, 1, head_dim, generator=generator).half()
    operands = (moved(keys, device), moved(values, device), length_B.to(device))
    actual = joint_attention(query.to(device), *operands, Scoring(0.1), rotation=moved(rotation, device))
    expected = reference(query.double(), keys, values, length_B, Scoring(0.1), rotation=rotation)
    check_near(actual.cpu(), expected, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("length", [1, 31, 141])
def test_rows_of_several_classes(device, generator, dtype, length):
    keys, values = (tokenwise_rows(length, rank, 64, dtype=dtype, generator=generator) for rank in (19, 43))
    query = torch.randn(1, 4, 2, 32, generator=generator).to(dtype)
    options = {"scoring": Scoring(0.25), "rotation": RotaryTable.from_complex(angles(1, 200, 32, generator))}
    length_B = torch.tensor([length], dtype=torch.int32)
    check_equal(joint_attention, reference, (query, keys, values, length_B), device=device, splits=3, **options)


def test_a_query_that_sees_nothing_gets_nothing(device, generator):
    length = torch.tensor([40, 0], dtype=torch.int32)
    shape = {"room": 40, "dtype": torch.float16, "generator": generator}
    keys, values = (latent_rows(2, 1, length, 16, 64, **shape) for _ in range(2))
    query = torch.randn(2, 4, 1, 32, generator=generator).half()
    actual = joint_attention(
        query.to(device), moved(keys, device), moved(values, device), length.to(device), Scoring(0.25)
    ).cpu()
    assert actual[0].any()
    assert not actual[1].any()
