"""Decode attention over paged stores against the fp64 reference."""

import pytest
import torch
from attended_rows import moved
from errors import check_near

from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.paged_attention.reference import paged_attention as reference
from lowrank_kv.ops.paged_attention.triton import paged_attention
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.stores.page_pool import PagePool
from lowrank_kv.stores.paged import PagedStore
from lowrank_kv.stores.quantization import IntegerQuantization

BATCH, LENGTHS = 2, (190, 41)


def paged_store(width, lengths, *, dtype, device, generator, granule=32, tokens=64, bits=None, ranks=None):
    """Rows of random ranks; what lies beyond a rank, and pages that nobody has, are NaN."""
    longest = max(lengths)
    pool = PagePool(
        (longest // tokens + width // granule + 1) * len(lengths) * width // granule,
        tokens=tokens,
        granule=granule,
        dtype=dtype,
        device=device,
        quantization=None if bits is None else IntegerQuantization(bits=bits),
    )
    pool.page_PNY.fill_(255 if bits else torch.nan)
    store = PagedStore(len(lengths), width, capacity=longest + 3, pool=pool)
    rank = torch.randint(0, width // granule + 1, (len(lengths), longest), generator=generator) * granule
    if ranks is not None:
        rank.fill_(ranks)
    coef = torch.randn(len(lengths), longest, width, generator=generator)
    coef[torch.arange(width) >= rank[..., None]] = torch.nan
    coef[torch.arange(longest) >= torch.tensor(lengths)[:, None]] = torch.nan
    # In two parts, so that tiles of one rank are not all in one run.
    for part in (slice(0, longest // 3), slice(longest // 3, longest)):
        store.append(coef[:, part].to(device), rank[:, part].to(device))
    store.crop(torch.tensor(lengths, device=device))
    return store


def rotary_table(batch, positions, half, generator, scale=1.0):
    angle = torch.rand(batch, positions, half, generator=generator) * 6
    return RotaryTable.from_complex(torch.polar(torch.full_like(angle, scale), angle))


def check(device, generator, *, dtype, groups=2, heads=6, head_dim=64, queries=1, lengths=LENGTHS, **case):
    width, batch = groups * head_dim, len(lengths)
    shape = {"dtype": dtype, "device": device, "generator": generator}
    shape |= {name: case[name] for name in ("bits", "ranks", "granule", "tokens") if name in case}
    keys = paged_store(width, lengths, **shape | case.get("keys", {}))
    values = paged_store(width, lengths, **shape)
    decoders = Decoders(*(torch.randn(2, width, width, generator=generator) / width**0.5).to(device, dtype))
    query = torch.randn(batch, heads, queries, head_dim, generator=generator).to(dtype)
    sink_H = torch.linspace(-2, 6, heads, device=device) if case.get("sinks") else None
    options = {"scoring": Scoring(0.25, case.get("softcap"), sink_H)}
    if "rotary" in case:
        rotated = case["rotary"] or head_dim
        table = rotary_table(case.get("tables", 1), keys.capacity + 9, rotated // 2, generator, case.get("scale", 1.0))
        options["rotation"] = moved(table, device)
    if case.get("masked"):
        mask = torch.rand(batch, queries, keys.capacity, generator=generator) < 0.7
        options["mask_BQT"] = mask.to(device)
    arguments = (keys, values, decoders)
    expected = reference(query.to(device).double(), *arguments, **options)
    actual = paged_attention(query.to(device), *arguments, splits=case.get("splits", 2), **options)
    check_near(actual, expected, dtype)


CASES = {
    "rotated": {"rotary": 0},
    "partly rotated": {"rotary": 16},
    "not rotated": {},
    "rotated, scaled, own tables, capped, masked": {
        "rotary": 0,
        "scale": 1.3,
        "tables": BATCH,
        "softcap": 2.0,
        "masked": True,
        "queries": 2,
    },
    "rotated int8": {"rotary": 0, "bits": 8},
    "rotated int4": {"rotary": 0, "bits": 4},
    "not rotated int8": {"bits": 8, "masked": True, "queries": 2},
    "not rotated int4": {"bits": 4, "softcap": 2.0},
    "many splits": {"rotary": 0, "splits": 5},
    "sinks": {"rotary": 0, "sinks": True, "queries": 2},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_reference(device, generator, case):
    check(device, generator, dtype=torch.float16, **case)


@pytest.mark.parametrize("name", ["rotated", "rotated int4", "many splits"])
def test_bf16(device, generator, name):
    check(device, generator, dtype=torch.bfloat16, **CASES[name])


@pytest.mark.parametrize(
    "case",
    [
        {"head_dim": 64, "groups": 3, "heads": 9, "granule": 64},
        {"head_dim": 96, "groups": 2, "heads": 2},
        {"head_dim": 128, "groups": 1, "heads": 8, "ranks": 128},
        {"head_dim": 256, "groups": 1, "heads": 2, "granule": 64, "tokens": 16},
        {"head_dim": 64, "lengths": (1,), "ranks": 32},
        {"head_dim": 64, "lengths": (63,), "granule": 16, "tokens": 16},
        {"head_dim": 64, "lengths": (130, 130), "keys": {"ranks": 0}},
        {
            "head_dim": 64,
            "groups": 1,
            "heads": 2,
            "lengths": (600, 41),
            "tokens": 16,
            "splits": 1,
        },  # tiles of two look-ups
    ],
    ids=lambda case: " ".join(f"{key} {value}" for key, value in case.items()),
)
def test_odd_sizes(device, generator, case):
    check(device, generator, dtype=torch.float16, rotary=0, **case)


def test_fp32(device, generator):
    check(device, generator, dtype=torch.float32, rotary=0)
    check(device, generator, dtype=torch.float32)


def test_a_query_that_sees_nothing_gets_nothing(device, generator):
    shape = {"dtype": torch.float16, "device": device, "generator": generator}
    keys, values = (paged_store(64, (50, 0), **shape) for _ in range(2))
    decoders = Decoders(*torch.randn(2, 64, 64, generator=generator).half().to(device))
    query = torch.randn(2, 4, 2, 32, generator=generator).half().to(device)
    mask = torch.ones(1, 2, keys.capacity, dtype=torch.bool, device=device)
    mask[:, 1] = False
    for attend in (paged_attention, reference):
        actual = attend(query, keys, values, decoders, Scoring(0.25), mask_BQT=mask)
        assert actual[0, :, 0].any()
        assert not actual[0, :, 1].any()
        assert not actual[1].any()


def test_values_without_coefficients_are_nothing(device, generator):
    shape = {"dtype": torch.float16, "device": device, "generator": generator}
    keys, values = paged_store(64, (50, 9), **shape), paged_store(64, (50, 9), ranks=0, **shape)
    decoders = Decoders(*torch.randn(2, 64, 64, generator=generator).half().to(device))
    query = torch.randn(2, 4, 1, 32, generator=generator).half().to(device)
    actual = paged_attention(query, keys, values, decoders, Scoring(0.25))
    assert torch.equal(actual, torch.zeros_like(actual))
