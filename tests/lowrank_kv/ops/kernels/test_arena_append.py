"""Tokens written into pages by kernels against compiled code and the plain form: the same bytes, and as many rows cut."""

import pytest
import torch
from paged_rows import HEAD_DIM, HEADS, RANKED, WIDTH, coefficients, layout_of, ranks
from torch import Tensor
from written_pages import Written

from lowrank_kv.ops.arena_append import triton as arena_append
from lowrank_kv.ops.arena_append.triton import PageWriter
from lowrank_kv.ops.native.pages import NewTokens
from lowrank_kv.stores.arena import PageLayout, write_rows
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.quantization import IntegerQuantization
from lowrank_kv.stores.ranked_rows import RankedRows
from lowrank_kv.utils.errors import UserError

FORMS = [1, 2, 4, *RANKED]
BETWEEN = 48  # bytes from the end of a page to the next one
NAN, UNWRITTEN = 0xFF, 0xA5  # bytes: of a number in fp32 or bf16, and of pages at first, as Written has them


class Kernels:
    """Pages that kernels write, with the interface of compiled ones; what they get stands between NaNs."""

    def __init__(self, count: int, layout: PageLayout, device: torch.device):
        memory = torch.full((count, layout.page_bytes + BETWEEN), NAN, dtype=torch.uint8, device=device)
        self.page_XY, self._between_XY = memory.split([layout.page_bytes, BETWEEN], dim=1)
        self.page_XY.fill_(UNWRITTEN)
        self._writer, self._device = PageWriter(self.page_XY, layout), device

    def write(self, new: NewTokens, key_TC: Tensor, value_TC: Tensor, ranks: list[Tensor] | None = None) -> int:
        before = int(self._writer.cut)
        states = (self._among_nans(state_TGD) for state_TGD in (new.key_TGD, new.value_TGD))
        places = (place_T.to(self._device) for place_T in (new.position_T, new.slot_T))
        coefs = (self._among_nans(coef_TC) for coef_TC in (key_TC, value_TC))
        ranks = ranks and tuple(rank_T.to(self._device) for rank_T in ranks)
        self._writer.write(NewTokens(*states, *places), *coefs, ranks)
        assert (self._between_XY == NAN).all()
        return int(self._writer.cut) - before

    def _among_nans(self, tensor: Tensor) -> Tensor:
        wide = torch.full((len(tensor) + 2, *tensor.shape[1:-1], tensor.shape[-1] + 8), torch.nan, dtype=tensor.dtype)
        wide[1:-1, ..., : tensor.shape[-1]] = tensor
        return wide.to(self._device)[1:-1, ..., : tensor.shape[-1]]


def two(form, lengths: list[int], device, dtype=torch.float32, seed=0, **layout) -> tuple[Written, Written]:
    """The same tokens for compiled code and for kernels, nothing written yet."""
    layout = layout_of(form, itemsize=dtype.itemsize, **layout)
    compiled, ours = (Written(layout, lengths, dtype, seed) for _ in range(2))
    ours.pages = Kernels(len(compiled.page_XY), layout, device)
    return compiled, ours


def check_equal(compiled: Written, ours: Written) -> None:
    assert torch.equal(ours.pages.page_XY.cpu(), compiled.page_XY)


def pieces(lengths: list[int], seed: int) -> list[list[tuple[int, int, int]]]:
    """Random divisions of sequences into calls, each of pieces of some sequences."""
    generator, done, calls = torch.Generator().manual_seed(seed), [0] * len(lengths), []
    while done != lengths:
        wanted = torch.randint(0, 34, (len(lengths),), generator=generator).tolist()
        ends = [min(start + more, length) for start, more, length in zip(done, wanted, lengths, strict=True)]
        spans = [(b, start, end) for b, (start, end) in enumerate(zip(done, ends, strict=True)) if start < end]
        calls += [spans] if spans else []
        done = ends
    return calls


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_are_those_of_compiled_code_and_of_the_plain_form(device, form, dtype):
    lengths = [40, 33, 1] if dtype == torch.float32 else [37]
    compiled, ours = two(form, lengths, device, dtype, margin=0.0)
    expected_cut = compiled.write_all()
    cut = sum(ours.write(spans) for spans in pieces(lengths, FORMS.index(form)))
    check_equal(compiled, ours)
    assert cut == expected_cut
    # Pages that are too small for what is asked for, or the test is of nothing.
    assert cut or dtype == torch.bfloat16 or form in (1, "fixed", "halves", "int8", "int4")
    plain_XY, plain_cut = compiled.plain()
    assert torch.equal(plain_XY, compiled.page_XY)
    assert cut == plain_cut


@pytest.mark.parametrize("form", [4, "floats"])
def test_a_row_that_is_written_again_takes_later_ones_with_it(device, form):
    compiled, ours = two(form, [60], device, margin=0.0, block_size=64)
    for tokens in (compiled, ours):
        tokens.write_all()
        for side in range(2):  # other tokens, from one in the middle on
            tokens.coef_SBTC[side][0] = coefficients(60, seed=50 + side)
            if form == "floats":
                tokens.rank_SBT[side][0] = ranks(RANKED[form], 60, seed=60 + side)
        tokens.cut = tokens.write([(0, 21, 35)]) + tokens.write([(0, 35, 60)])
    check_equal(compiled, ours)
    assert ours.cut == compiled.cut > 0


@pytest.mark.parametrize(("form", "at_once"), [(1, 16), (4, 4), (4, 128), ("floats", 16), ("int4", 4)])
def test_tokens_of_a_page_stand_apart(device, monkeypatch, form, at_once):
    """Two sequences' tokens take turns, and some of no place and NaN coefficients stand between."""
    monkeypatch.setattr(arena_append, "_TOKENS_AT_ONCE", at_once)
    monkeypatch.setattr(arena_append, "_NUMBERS_AT_ONCE", 2 * at_once)
    tokens, count = 18, 3 * 18
    layout = layout_of(form, margin=0.0)
    generator = torch.Generator().manual_seed(at_once)
    slot_T = torch.stack(
        [torch.arange(tokens) + page * 32 for page in (3, 1)] + [torch.full((tokens,), -1)], 1
    ).flatten()
    new = NewTokens(
        *torch.randn(2, count, HEADS, HEAD_DIM, generator=generator),
        torch.arange(tokens)[:, None].expand(-1, 3).flatten() + torch.tensor([0, 32, 0]).repeat(tokens),
        slot_T,
    )
    coefs = [coefficients(count, at_once + side) for side in range(2)]
    for coef_TC in coefs:
        coef_TC[slot_T < 0] = torch.nan
    asked = [ranks(side.row_format, count, at_once) for side in (layout.keys, layout.values)]
    asked = None if asked[0] is None else asked
    compiled = Written(layout, [128])
    ours = Kernels(len(compiled.page_XY), layout, device)
    assert ours.write(new, *coefs, asked) == compiled.pages.write(new, *coefs, asked)
    assert torch.equal(ours.page_XY.cpu(), compiled.page_XY)


def written_alone(row_format, coef_TC: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A page's rows as kernels, and as compiled code, write them."""
    layout = PageLayout.of(row_format, row_format, block_size=32, num_sinks=0, sink_bytes=0)
    compiled = Written(layout, [32])
    ours = Kernels(1, layout, device)
    count = len(coef_TC)
    states_TGD = torch.zeros(count, HEADS, HEAD_DIM)
    new = NewTokens(states_TGD, states_TGD, torch.arange(count), torch.arange(count))
    for pages in (ours, compiled.pages):
        pages.write(new, coef_TC, coef_TC)
    plain_Y = torch.full_like(compiled.page_XY[0], UNWRITTEN)
    write_rows(layout.keys, plain_Y, 0, coef_TC, is_first=True)
    end = layout.keys.end
    assert torch.equal(plain_Y[:end], compiled.page_XY[0, :end])
    return ours.page_XY[0].cpu(), compiled.page_XY[0]


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_between_two_codes(device, bits):
    """The step is 1 and the least value 0, so that halves are ties."""
    coef_C = torch.arange(WIDTH) % (2**bits - 2) + 0.5
    coef_C[0], coef_C[1] = 0.0, (2**bits - 1) / (1 + 2.0**-8)
    rows = RankedRows(
        num_coefficients=WIDTH,
        granularity=None,
        mean_row_bytes=0.0,
        dtype=torch.float32,
        quantization=IntegerQuantization(bits=bits),
    )
    ours_Y, compiled_Y = written_alone(rows, coef_C[None], device)
    assert rows.quantization.encode(coef_C[None])[1].tolist() == [[1.0, 0.0]]
    assert torch.equal(ours_Y, compiled_Y)


def test_coefficients_between_two_levels(device):
    """Rows whose scale is 1: at the middle of two levels, and halfway between two numbers of bf16; and rows of any size."""
    levels = {2: torch.tensor([-2.0, -1.0, 0.0, 2.0])}
    plan = BitPlan((16,) * 8 + (2,) * (WIDTH - 8), levels)
    coef_TC = torch.ones(32, WIDTH)
    coef_TC[0, 8:14] = torch.tensor([-1.5, -0.5, 1.0, -0.5, -1.5, 1.0])
    coef_TC[1, :4] = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF], dtype=torch.int32).view(
        torch.float32
    )
    coef_TC[2] = 0.0
    coef_TC[3:] = coefficients(29, 5) * 2.0 ** torch.arange(-18, 11)[:, None]
    ours_Y, compiled_Y = written_alone(plan, coef_TC, device)
    assert compiled_Y[0] == compiled_Y[plan.row_bytes(WIDTH)] == 128  # scales of the first two
    assert torch.equal(ours_Y, compiled_Y)


def test_every_width_and_number_of_classes(device):
    """Plans whose rows begin and end anywhere in a byte, wider than one program's tokens."""
    for bits in ((16,), (1,) * 31, (8, 5, 3, 1), (6,) * 3 + (5,) * 2 + (2,) * 7 + (1,) * 3):
        levels = {width: torch.linspace(-2, 2, 2**width) for width in set(bits) - {16}}
        ours_Y, compiled_Y = written_alone(BitPlan(bits, levels), coefficients(7, len(bits)), device)
        assert torch.equal(ours_Y, compiled_Y)


def test_a_call_without_tokens_or_places_writes_nothing(device):
    layout = layout_of(4)
    ours = Kernels(2, layout, device)
    for count in (0, 3):
        states_TGD = torch.zeros(count, HEADS, HEAD_DIM)
        coef_TC = torch.zeros(count, WIDTH)
        places_T = torch.full((count,), -1)
        assert ours.write(NewTokens(states_TGD, states_TGD, places_T, places_T), coef_TC, coef_TC) == 0
        assert (ours.page_XY == UNWRITTEN).all()


def test_pages_that_cannot_be_written_are_refused(device):
    layout = layout_of(4)
    with pytest.raises(UserError, match=f"pages have {layout.page_bytes - 1} bytes, and their layout needs"):
        PageWriter(torch.zeros(2, layout.page_bytes - 1, dtype=torch.uint8, device=device), layout)
    with pytest.raises(UserError, match="pages must begin at multiples of 4 bytes; got one every"):
        PageWriter(torch.zeros(2, layout.page_bytes + 2, dtype=torch.uint8, device=device), layout)
