"""Decode attention on per-head coefficients against the fp64 reference."""

import dataclasses

import pytest
import torch
from errors import check_near

from lowrank.ops.full_tokens import FullTokens
from lowrank.ops.latent_attention.operands import LatentRows
from lowrank.ops.latent_attention.reference import latent_attention as reference
from lowrank.ops.latent_attention.triton import latent_attention
from lowrank.quantise import Quantisation


def latent_rows(batch, groups, length_B, rank, head_dim, *, room, dtype, generator, bits=None, shared=False):
    """Rows beyond a sequence's length are NaN, or codes whose scales are."""
    coef = torch.randn(batch, groups, room, rank, generator=generator).to(dtype)
    bases = torch.randn(1 if shared else batch, groups, head_dim, rank, generator=generator) / head_dim**0.5
    beyond = (torch.arange(room) >= length_B[:, None])[:, None, :, None]
    if bits is None:
        return LatentRows(coef.masked_fill(beyond, torch.nan), bases.to(dtype))
    quantisation = Quantisation(bits=bits)
    codes, scales = quantisation.encode(coef)
    return LatentRows(codes, bases.to(dtype), scales.masked_fill(beyond, torch.nan), quantisation)


def full_tokens(batch, groups, length_B, room, head_dim, *, queries, dtype, generator):
    key, value = torch.randn(2, batch, groups, room, head_dim, generator=generator).to(dtype)
    beyond = (torch.arange(room) >= length_B[:, None])[:, None, :, None]
    mask = torch.rand(batch, queries, room, generator=generator) < 0.8
    return FullTokens(key.masked_fill(beyond, torch.nan), value.masked_fill(beyond, torch.nan), length_B, mask)


def moved(operands, device):
    """The same dataclass with its tensors on a device."""
    fields = {f.name: getattr(operands, f.name) for f in dataclasses.fields(operands)}
    return type(operands)(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in fields.items()})


def cleaned(rows: LatentRows) -> LatentRows:
    """Zero in place of NaN, for a reference that multiplies every row before it masks."""
    if rows.scale_BGN2 is None:
        return dataclasses.replace(rows, row_BGNY=rows.row_BGNY.nan_to_num())
    return dataclasses.replace(rows, scale_BGN2=rows.scale_BGN2.nan_to_num())


CASES = {
    "plain": {},
    "int8": {"bits": 8},
    "int4": {"bits": 4},
    "capped, masked": {"softcap": 2.0, "masked": True, "queries": 3},
    "with full tokens": {"full": 37, "masked": True},
    "int4 with full tokens": {"full": 5, "bits": 4, "queries": 2},
    "shared bases, one KV head": {"shared": True, "groups": 1, "heads": 8},
    "many splits": {"splits": 7, "full": 20},
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
    batch, groups, head_dim, room = 2, case["groups"], 64, 300
    length = torch.tensor([291, 63], dtype=torch.int32)
    shapes = {"room": room, "dtype": dtype, "generator": generator, "bits": case["bits"], "shared": case["shared"]}
    keys = latent_rows(batch, groups, length, 21, head_dim, **shapes)
    values = latent_rows(batch, groups, length, 43, head_dim, **shapes)
    query = torch.randn(batch, case["heads"], case["queries"], head_dim, generator=generator).to(dtype)
    options = {"scaling": 0.25, "softcap": case.get("softcap")}
    mask = full = None
    if case.get("masked"):
        mask = torch.rand(batch, case["queries"], room, generator=generator) < 0.7
    if case["full"]:
        length_full = torch.tensor([case["full"] - 2, case["full"]], dtype=torch.int32)
        shape = {"queries": case["queries"], "dtype": dtype, "generator": generator}
        full = full_tokens(batch, groups, length_full, case["full"], head_dim, **shape)
    clean = full and dataclasses.replace(
        full, key_BGFD=full.key_BGFD.nan_to_num(), value_BGFD=full.value_BGFD.nan_to_num()
    )
    expected = reference(query.double(), cleaned(keys), cleaned(values), length, mask_BQN=mask, full=clean, **options)
    actual = latent_attention(
        query.to(device),
        moved(keys, device),
        moved(values, device),
        length.to(device),
        mask_BQN=None if mask is None else mask.to(device),
        full=full and moved(full, device),
        splits=case["splits"],
        **options,
    )
    check_near(actual.cpu(), expected, dtype)


@pytest.mark.parametrize(("length", "rank", "head_dim"), [(1, 1, 64), (1000, 128, 128), (64, 256, 256)])
def test_odd_sizes(device, generator, length, rank, head_dim):
    length_B = torch.tensor([length], dtype=torch.int32)
    shape = {"room": length, "dtype": torch.float16, "generator": generator}
    keys, values = (latent_rows(1, 1, length_B, rank, head_dim, **shape) for _ in range(2))
    query = torch.randn(1, 2, 1, head_dim, generator=generator).half()
    actual = latent_attention(
        query.to(device), moved(keys, device), moved(values, device), length_B.to(device), scaling=0.1
    )
    check_near(actual.cpu(), reference(query.double(), keys, values, length_B, scaling=0.1), torch.float16)


def test_a_query_that_sees_nothing_gets_nothing(device, generator):
    length = torch.tensor([40, 0], dtype=torch.int32)
    shape = {"room": 40, "dtype": torch.float16, "generator": generator}
    keys, values = (latent_rows(2, 2, length, 16, 64, **shape) for _ in range(2))
    query = torch.randn(2, 4, 1, 64, generator=generator).half()
    arguments = (moved(keys, device), moved(values, device), length.to(device))
    actual = latent_attention(query.to(device), *arguments, scaling=0.25).cpu()
    assert actual[0].any()
    assert not actual[1].any()
    nothing = torch.zeros(1, 1, 40, dtype=torch.bool, device=device)
    assert not latent_attention(query.to(device), *arguments, scaling=0.25, mask_BQN=nothing).any()
