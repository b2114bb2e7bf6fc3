"""What kernels that attend over rows of one rank are checked on, and how: joint and per-head coefficients alike."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from errors import check_near
from torch import Tensor

from lowrank_kv.bases.codebooks import lloyd_max
from lowrank_kv.ops.full_rank_tokens import FullRankTokens
from lowrank_kv.ops.lowrank_attention.latent_rows import LatentRows
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.stores.bit_plan import UNCODED, WIDTHS, BitPlan
from lowrank_kv.stores.importance_gate import ImportanceGate
from lowrank_kv.stores.quantization import IntegerQuantization
from lowrank_kv.stores.token_plans import TokenPlans
from lowrank_kv.stores.tokenwise import TokenwiseCoefficients


def latent_rows(batch, groups, length_B, rank, head_dim, *, room, dtype, generator, bits=None, shared=False):
    """Rows beyond a sequence's length are NaN, or codes whose scales are."""
    coef = torch.randn(batch, groups, room, rank, generator=generator).to(dtype)
    bases = torch.randn(1 if shared else batch, groups, head_dim, rank, generator=generator) / head_dim**0.5
    beyond = (torch.arange(room) >= length_B[:, None])[:, None, :, None]
    if bits == "plan":
        plan = mixed_plan(rank)
        rows, _ = plan.encode(coef)
        rows = rows.masked_fill(beyond, 127)  # numbers of 3e38
        return LatentRows(rows, bases.to(dtype), None, plan)
    if bits is None:
        return LatentRows(coef.masked_fill(beyond, torch.nan), bases.to(dtype))
    quantization = IntegerQuantization(bits=bits)
    codes, scales = quantization.encode(coef)
    return LatentRows(codes, bases.to(dtype), scales.masked_fill(beyond, torch.nan), quantization)


def mixed_plan(rank: int) -> BitPlan:
    """Widths from 16 bits to one, of as many coefficients each as the rank allows."""
    widths = sorted((WIDTHS[::-1][place * len(WIDTHS) // rank] for place in range(rank)), reverse=True)
    sample = torch.randn(40_000, generator=torch.Generator().manual_seed(3))
    return BitPlan(widths, {width: lloyd_max(sample, width) for width in {*widths} - {UNCODED}})


def tokenwise_rows(length, rank, width, *, dtype, generator) -> LatentRows:
    """One sequence's, of three classes of at most `rank` coefficients, with some room to grow."""
    gate = ImportanceGate(
        linear_C=torch.randn(width, generator=generator),
        square_C=torch.zeros(width),
        rest_3=torch.zeros(3),
        leading=width,
    )
    plans = TokenPlans(
        gate=gate,
        bounds_K=torch.tensor([-3.0, 3.0]),
        plans=tuple(mixed_plan(max(1, rank // part)) for part in (3, 2, 1)),
        shares=(1 / 3,) * 3,
    )
    coef = TokenwiseCoefficients(plans, dtype=dtype, device=torch.device("cpu"))
    coef.append(torch.randn(1, length, width, generator=generator))
    bases = torch.randn(1, 1, width, rank, generator=generator) / width**0.5
    # Rows for which there is room are of the first class: the reference reads them, too, before it masks them.
    room = 8 * 4 * plans.row_bytes()[0]
    pairs = ((coef.stored, room), (coef.classes, 7), (coef.marks, 2))
    rows = [torch.nn.functional.pad(each.rows, (0, more)) for each, more in pairs]
    return LatentRows(rows[0][None, None, :, None], bases.to(dtype), None, plans, rows[1][None], rows[2][None])


def full_tokens(batch, groups, length_B, room, head_dim, *, queries, dtype, generator):
    key, value = torch.randn(2, batch, groups, room, head_dim, generator=generator).to(dtype)
    beyond = (torch.arange(room) >= length_B[:, None])[:, None, :, None]
    mask = torch.rand(batch, queries, room, generator=generator) < 0.8
    return FullRankTokens(key.masked_fill(beyond, torch.nan), value.masked_fill(beyond, torch.nan), length_B, mask)


def moved(operands, device):
    """The same dataclass with its tensors on a device."""
    fields = {f.name: getattr(operands, f.name) for f in dataclasses.fields(operands)}
    movable = Tensor, BitPlan, TokenPlans
    return type(operands)(**{k: v.to(device) if isinstance(v, movable) else v for k, v in fields.items()})


def cleaned(operands):
    """The same dataclass with zero in place of NaN, for a reference that multiplies every row before it masks."""
    fields = {f.name: getattr(operands, f.name) for f in dataclasses.fields(operands)}
    floats = {k: v for k, v in fields.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return dataclasses.replace(operands, **{k: v.nan_to_num() for k, v in floats.items()})


def beside(case: dict, room: int, groups: int, query: Tensor, generator: torch.Generator) -> dict[str, Any]:
    """The options of a case that every kernel has: what is done to scores, splits, a mask, tokens at full rank."""
    batch, heads, queries, head_dim = query.shape
    sink_H = torch.linspace(-2, 6, heads) if case.get("sinks") else None
    options = {"scoring": Scoring(0.25, case.get("softcap"), sink_H), "splits": case["splits"]}
    if case.get("masked"):
        options["mask_BQN"] = torch.rand(batch, queries, room, generator=generator) < 0.7
    if case["full"]:
        length = torch.tensor([case["full"] - 2, case["full"]], dtype=torch.int32)
        shape = {"queries": queries, "dtype": query.dtype, "generator": generator}
        options["full"] = full_tokens(batch, groups, length, case["full"], head_dim, **shape)
    return options


def check_equal(
    kernel: Callable, reference: Callable, rows: tuple, *, device: torch.device, splits: int, **options: Any
) -> None:
    """The kernel on the device against the reference in fp64.

    Args:
        rows: queries, rows of keys, rows of values, lengths.
    """

    def on_device(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        if isinstance(value, Scoring):
            return value._replace(sink_H=on_device(value.sink_H))
        return moved(value, device) if dataclasses.is_dataclass(value) else value

    def clean(value: Any) -> Any:
        return cleaned(value) if isinstance(value, FullRankTokens) else value

    query, keys, values, length = rows
    known = {name: clean(value) for name, value in options.items()}
    expected = reference(query.double(), cleaned(keys), cleaned(values), length, **known)
    given = {name: on_device(value) for name, value in options.items()}
    actual = kernel(*map(on_device, rows), splits=splits, **given)
    check_near(actual.cpu(), expected, query.dtype)
