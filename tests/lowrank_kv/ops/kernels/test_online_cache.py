"""OjaKV's caches, whose decoding goes through the kernels by itself, against plain torch."""

import copy
from unittest import mock

import pytest
import torch
from errors import check_near
from methods import calibration_of, tiny_model

from lowrank_kv.ops.lowrank_attention import LowRankTokens, Operands, lowrank_attention, reference, triton
from lowrank_kv.ops.rotation import RotaryTable, Rotation
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.triton import availability
from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.growable_tensor import GrowingRows, GrowingTensor
from lowrank_kv.stores.quantization import IntegerQuantization
from ojakv import OjaKVCache, OjaKVConfig, make_plan

HEADS, GROUPS, HEAD_DIM = 6, 2, 32


@pytest.fixture
def kernel_calls(monkeypatch):
    """A spy on the kernels' operation."""
    spy = mock.Mock(wraps=triton.lowrank_attention)
    monkeypatch.setattr(triton, "lowrank_attention", spy)
    return spy


def operands(low, full, rank, *, dtype, generator, bits=None, groups=GROUPS, joint=False) -> Operands:
    """With room to grow, which is filled with NaN, or codes whose scales are."""
    parts, width = (1, groups * HEAD_DIM) if joint else (groups, HEAD_DIM)
    coef = Coefficients(
        (parts, rank), dtype=dtype, device="cpu", quantization=None if bits is None else IntegerQuantization(bits=bits)
    )
    coef.append(torch.randn(parts, low, rank, generator=generator).to(dtype))
    coef.reserve(low + 9)
    for tensor in coef.buffers():
        if tensor is not None:
            tensor[:, low:] = torch.nan if tensor.is_floating_point() else 255
    whole = GrowingTensor(torch.randn(groups, full, HEAD_DIM, generator=generator).to(dtype), dim=1)
    whole.reserve(full + 3)
    whole.buffer[:, full:] = torch.nan
    basis = torch.linalg.qr(torch.randn(parts, width, width, generator=generator)).Q[:, :, :rank]
    return Operands(coef, basis.to(dtype), whole)


def on(device, held: Operands) -> Operands:
    """The same tensors on a device, room to grow included."""

    def moved(rows: GrowingRows) -> GrowingRows:
        twin = rows.clone()
        twin.buffers = tuple(buffer.to(device) for buffer in rows.buffers)
        return twin

    coef = copy.copy(held.coef)
    coef.stored = moved(coef.stored)
    assert coef.buffers()[0].shape[1] > coef.length
    return Operands(coef, held.basis_PWR.to(device), moved(held.full))


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize(("low", "full", "queries"), [(300, 20, 1), (40, 0, 1), (90, 7, 3)])
def test_one_sequence_equals_the_reference(device, generator, kernel_calls, low, full, queries, bits):
    dtype = torch.float16
    keys = operands(low, full, 5, dtype=dtype, generator=generator, bits=bits)
    values = operands(low, full, 21, dtype=dtype, generator=generator, bits=bits)
    query = torch.randn(HEADS, queries, HEAD_DIM, generator=generator).to(dtype)
    scoring = Scoring(0.25, softcap=3.0)
    mask = None
    if queries > 1:
        mask = torch.rand(queries, low + full, generator=generator) < 0.7
        mask[:, -1] = True
    expected = reference.lowrank_attention(query.double(), LowRankTokens(keys, values, mask_QT=mask), scoring)
    tokens = LowRankTokens(on(device, keys), on(device, values), mask_QT=None if mask is None else mask.to(device))
    found = lowrank_attention(query.to(device), tokens, scoring)
    assert kernel_calls.call_count == 1
    check_near(found.cpu(), expected, dtype)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("positions", [slice(7, 97), torch.arange(90).flip(0) + 3], ids=["run", "spread"])
def test_joint_coefficients_equal_the_reference(device, generator, kernel_calls, positions, bits):
    dtype, queries, low, full = torch.float16, 3, 90, 7
    keys = operands(low, full, 13, dtype=dtype, generator=generator, bits=bits, joint=True)
    values = operands(low, full, 41, dtype=dtype, generator=generator, bits=bits, joint=True)
    query = torch.randn(HEADS, queries, HEAD_DIM, generator=generator).to(dtype)
    mask = torch.rand(queries, low + full, generator=generator) < 0.7
    mask[:, -1] = True
    scoring = Scoring(0.25, softcap=3.0)
    angle = torch.rand(100, HEAD_DIM // 2, generator=generator) * 6
    angle_TF = torch.polar(torch.ones_like(angle), angle)

    def rotation(there: torch.device | str) -> Rotation:
        return Rotation(
            lambda key_GND, at: rotated(key_GND.double(), angle_TF[at]),
            RotaryTable.from_complex(angle_TF[None].to(there)),
        )

    tokens = LowRankTokens(keys, values, rotation("cpu"), positions, mask)
    expected = reference.lowrank_attention(query.double(), tokens, scoring)
    there = positions.to(device) if isinstance(positions, torch.Tensor) else positions
    tokens = LowRankTokens(on(device, keys), on(device, values), rotation(device), there, mask.to(device))
    found = lowrank_attention(query.to(device), tokens, scoring)
    assert kernel_calls.call_count == 1
    check_near(found.cpu(), expected, dtype)


def rotated(key_GND: torch.Tensor, angle_NF: torch.Tensor) -> torch.Tensor:
    """Keys whose pairs (j, j + D/2) are rotated by angles cos + i·sin."""
    pairs = torch.complex(*key_GND.chunk(2, dim=-1)) * angle_NF
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def test_as_many_kv_heads_as_queries_that_lie_as_models_leave_them(device, generator, kernel_calls):
    """Heads are then a transposed view whose rows do not follow one another."""
    keys, values = (operands(40, 9, 7, dtype=torch.float32, generator=generator, groups=HEADS) for _ in range(2))
    query = torch.randn(3, HEADS, HEAD_DIM, generator=generator).transpose(0, 1)
    expected = reference.lowrank_attention(query, LowRankTokens(keys, values), Scoring(0.25))
    found = lowrank_attention(query.to(device), LowRankTokens(on(device, keys), on(device, values)), Scoring(0.25))
    assert kernel_calls.call_count == 1
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


def test_what_the_kernels_do_not_serve_goes_the_plain_way(device, generator, kernel_calls):
    """Rows whose integers have scales by groups, a mask for every head, another dtype, more queries than registers hold,
    tokens of its own for every head, keys that are rotated otherwise."""
    keys, values = (operands(40, 3, 8, dtype=torch.float32, generator=generator) for _ in range(2))
    query = torch.randn(HEADS, 1, HEAD_DIM, generator=generator)
    mask_HQT = torch.rand(HEADS, 1, 43, generator=generator) < 0.7
    grouped = Coefficients(
        (GROUPS, 8), dtype=torch.float32, device="cpu", quantization=IntegerQuantization(bits=8, group_size=4)
    )
    grouped.append(keys.coef.rows())
    grouped.reserve(49)
    there = LowRankTokens(on(device, keys), on(device, values))
    assert not triton.unsupported_reason(query.to(device), there)
    assert triton.unsupported_reason(query.to(device).double(), there)
    assert triton.unsupported_reason(query.to(device).expand(-1, 200, -1), there)
    joint = on(device, operands(40, 3, 8, dtype=torch.float32, generator=generator, joint=True))
    unrotated = LowRankTokens(joint, joint)
    assert triton.unsupported_reason(query.to(device), unrotated)
    by_function = unrotated._replace(rotation=Rotation(lambda key, at: key), positions=slice(0, 40))
    assert triton.unsupported_reason(query.to(device), by_function)
    positions = torch.zeros(GROUPS, 40, dtype=torch.long)
    assert triton.unsupported_reason(query.to(device), there._replace(positions=positions))
    for keys_now, mask in ((keys, mask_HQT), (Operands(grouped, keys.basis_PWR, keys.full), None)):
        expected = reference.lowrank_attention(query, LowRankTokens(keys_now, values, mask_QT=mask), Scoring(0.25))
        mask = None if mask is None else mask.to(device)
        tokens = LowRankTokens(on(device, keys_now), on(device, values), mask_QT=mask)
        found = lowrank_attention(query.to(device), tokens, Scoring(0.25))
        torch.testing.assert_close(found.cpu(), expected, atol=2e-4, rtol=2e-4)
    assert not kernel_calls.called


def test_they_can_be_switched_off(device, generator, monkeypatch):
    held = operands(8, 1, 4, dtype=torch.float32, generator=generator)
    there = LowRankTokens(on(device, held), on(device, held))
    query = torch.randn(HEADS, 1, HEAD_DIM).to(device)
    assert not triton.unsupported_reason(query, there)
    monkeypatch.setenv(availability.SWITCH, "0")
    availability.has_kernels.cache_clear()
    try:
        assert triton.unsupported_reason(query, there)
    finally:
        availability.has_kernels.cache_clear()


@pytest.mark.parametrize(
    ("preset", "settings", "by_kernels"),
    [
        ("ojakv-pf", {"rate": 0.6}, True),
        ("ojakv-pf", {"rate": 0.5, "cache_dtype": "int8"}, True),
        ("ojakv", {"rate": 0.6, "recent_window": 3, "num_sink_tokens": 2, "full_rank_ratio": 0.2}, True),
        ("ojakv-joint", {"rate": 0.6, "recent_window": 3, "num_sink_tokens": 2}, True),
        ("ojakv-joint", {"rate": 0.6, "cache_dtype": "int4", "recent_window": 3}, True),
        ("ojakv-joint", {"rate": 0.6, "cache_dtype": "int8", "group_size": 4}, False),
        ("static-mixed", {"rate": 0.2, "recent_window": 3, "num_sink_tokens": 2}, True),
        ("tokenwise-mixed", {"rate": 0.2, "recent_window": 3, "num_sink_tokens": 2}, True),
    ],
    ids=str,
)
def test_generates_what_plain_torch_does(device, kernel_calls, monkeypatch, preset, settings, by_kernels):
    model = tiny_model(num_hidden_layers=1)
    config = OjaKVConfig.preset(preset, update_period=3, **settings)
    plan = make_plan(calibration_of(model, read=config.cache_dtype == "mixed"), config)
    model, ids = model.to(device), torch.arange(1, 25, device=device).view(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # left padding

    def answer() -> list:
        cache = OjaKVCache(model, plan)
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        return model.generate(ids, attention_mask=mask, past_key_values=cache, **options).tolist()

    found, calls = answer(), kernel_calls.call_count
    assert calls == (2 * 5 if by_kernels else 0)  # sequences, decoded tokens
    monkeypatch.setattr(triton, "unsupported_reason", lambda *_: "the test says so")
    assert answer() == found
    assert kernel_calls.call_count == calls
