"""Pages: the same bytes however tokens are divided into calls, within their room, and rows that are found again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_rows import FORMS, LAYOUTS, LEVELS, RANKED, WIDTH, coefficients, layout_of, plan_of, ranks

from lowrank_kv.stores.arena import PageLayout, SideLayout, levels_of, read_rows, write_rows
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.token_plans import TokenPlans
from lowrank_kv.utils.errors import UserError

PIECES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def blank(layout: PageLayout) -> torch.Tensor:
    """A page that holds what another sequence has left there."""
    return torch.full((layout.page_bytes,), 0xA5, dtype=torch.uint8)


def written(
    side: SideLayout,
    page_Y: torch.Tensor,
    coef_NC: torch.Tensor,
    pieces: list[int],
    is_first: bool,
    rank_N: torch.Tensor | None = None,
) -> int:
    """Writes the rows piece by piece, the last piece what is left."""
    row, cut = 0, 0
    for piece in [*pieces, len(coef_NC)]:
        part_NC = coef_NC[row : row + piece]
        part_N = None if rank_N is None else rank_N[row : row + piece]
        cut += write_rows(side, page_Y, row, part_NC, is_first=is_first, rank_N=part_N)
        row += len(part_NC)
    return cut


def bytes_of(side: SideLayout, levels: list[int]) -> int:
    """Of rows of these levels."""
    return sum(map(side.rows.size, levels))


def used(side: SideLayout, page_Y: torch.Tensor, count: int) -> list[torch.Tensor]:
    """What says something about the first `count` rows."""
    size = bytes_of(side, levels_of(side, page_Y, count))
    marks = (
        page_Y[side.marks : side.first_row].view(torch.int32)[: -(-count // 32)]
        if side.marks < side.first_row
        else page_Y[:0]
    )
    return [page_Y[side.first_row : side.first_row + size], marks, torch.tensor(levels_of(side, page_Y, count))]


@settings(deadline=None, max_examples=30)
@given(classes=FORMS, layout=LAYOUTS, pieces=PIECES, is_first=st.booleans(), seed=st.integers(0, 99))
def test_any_division_into_calls_gives_the_same_bytes(classes, layout, pieces, is_first, seed):
    block_size, num_sinks, margin = layout
    layout = layout_of(classes, block_size=block_size, num_sinks=num_sinks, margin=margin)
    for side in (layout.keys, layout.values):
        count = side.row_capacity(is_first=is_first)
        coef_NC = coefficients(count, seed)
        at_once, piecewise = blank(layout), blank(layout)
        rank_N = ranks(side.row_format, count, seed)
        cut = written(side, at_once, coef_NC, [], is_first, rank_N)
        assert written(side, piecewise, coef_NC, pieces, is_first, rank_N) == cut
        assert torch.equal(at_once, piecewise)
        held = levels_of(side, at_once, count)
        if rank_N is not None:
            wanted = rank_N.tolist()
        else:
            wanted = side.row_format.classes(coef_NC).tolist() if classes in (2, 4) else held
        assert cut == sum(level < asked for level, asked in zip(held, wanted, strict=True))
        assert bytes_of(side, held) <= side.row_room(is_first=is_first)
        untouched = torch.cat([at_once[: side.packed], at_once[side.first_row + side.row_room(is_first=is_first) :]])
        assert (untouched == 0xA5).all()


@settings(deadline=None, max_examples=20)
@given(classes=FORMS, kept=st.integers(0, 30), seed=st.integers(0, 99))
def test_rewritten_rows_take_the_later_ones_with_them(classes, kept, seed):
    layout = layout_of(classes)
    side, coef_NC = layout.keys, coefficients(30, seed)
    page_Y, fresh_Y = blank(layout), blank(layout)
    rank_N, other_N = (ranks(side.row_format, 30, seed + i) for i in range(2))
    drafts_NC = torch.cat([coef_NC[:kept], coefficients(30 - kept, seed + 1)])
    drafts_N = None if rank_N is None else torch.cat([rank_N[:kept], other_N[kept:]])
    written(side, page_Y, drafts_NC, [], True, drafts_N)
    left_N = None if rank_N is None else rank_N[kept:]
    write_rows(side, page_Y, kept, coef_NC[kept:], is_first=True, rank_N=left_N)
    written(side, fresh_Y, coef_NC, [], True, rank_N)
    for found, expected in zip(used(side, page_Y, 30), used(side, fresh_Y, 30), strict=True):
        assert torch.equal(found, expected)


def tokens_that_ask(side: SideLayout, count: int, seed: int, much: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Coefficients, and ranks where rows have some; if they ask for `much`, pages are full long before their end."""
    coef_NC, rank_N = coefficients(count, seed), ranks(side.row_format, count, seed)
    if much and isinstance(side.row_format, TokenPlans):
        coef_NC += 3 * side.row_format.gate.linear_C
    if much and rank_N is not None:
        rank_N = torch.full_like(rank_N, side.row_format.num_coefficients)
    return coef_NC, rank_N


def written_sequence(
    side: SideLayout,
    page_PY: list[torch.Tensor],
    coef_TC: torch.Tensor,
    rank_T: torch.Tensor | None,
    pieces: list[int],
    first: int = 0,
) -> None:
    """Writes a sequence's tokens from `first` on, piece by piece as a server's steps divide them; a piece may begin and end
    in any of the pages."""
    while first < len(coef_TC):
        end = min(first + pieces[0], len(coef_TC)) if pieces else len(coef_TC)
        pieces = pieces[1:]
        while first < end:
            page = first // side.block_size
            # A sequence's first tokens are exact, and have no rows.
            skipped = side.num_sinks if page == 0 else 0
            row, stop = first % side.block_size - skipped, min(end, (page + 1) * side.block_size)
            rows = slice(first - min(row, 0), stop)
            rank_N = None if rank_T is None else rank_T[rows]
            write_rows(side, page_PY[page], max(row, 0), coef_TC[rows], is_first=page == 0, rank_N=rank_N)
            first = stop


def read_sequence(side: SideLayout, page_PY: list[torch.Tensor], tokens: int) -> torch.Tensor:
    """All rows of a sequence, page behind page."""
    found, left = [], tokens - side.num_sinks
    for page, page_Y in enumerate(page_PY):
        count = min(left, side.row_capacity(is_first=page == 0))
        found.append(read_rows(side, page_Y, count))
        left -= count
    return torch.cat(found)


@settings(deadline=None, max_examples=12)
@given(
    classes=st.sampled_from([2, 4, "floats", "int8", "int4", "fixed"]),
    num_sinks=st.integers(0, 4),
    margin=st.sampled_from([0.0, 0.1]),
    lengths=st.tuples(st.integers(1, 36), st.integers(1, 36)),
    pieces=st.tuples(PIECES, PIECES, PIECES),
    writer=st.integers(0, 1),
    much=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sequences_that_begin_alike_may_share_a_page(classes, num_sinks, margin, lengths, pieces, writer, much, seed):
    """Whichever of the two writes the shared page, and however either is divided, its bytes are the same; and reading both
    sequences gives what pages of their own give."""
    block_size = 32
    layout = layout_of(classes, block_size=block_size, num_sinks=num_sinks, margin=margin)
    for side in (layout.keys, layout.values):
        prefix, rests = (
            tokens_that_ask(side, count, seed + i, much) for i, count in enumerate((block_size, max(lengths)))
        )
        ends = [slice(length) for length in lengths]
        coef_STC = [torch.cat([prefix[0], rests[0].roll(s, 0)[end]]) for s, end in enumerate(ends)]
        rank_ST = [
            None if prefix[1] is None else torch.cat([prefix[1], rests[1].roll(s, 0)[end]])
            for s, end in enumerate(ends)
        ]
        own_SPY = [[blank(layout) for _ in range(0, len(coef_TC), block_size)] for coef_TC in coef_STC]
        for s in range(2):
            written_sequence(side, own_SPY[s], coef_STC[s], rank_ST[s], pieces[s])
        assert torch.equal(own_SPY[0][0], own_SPY[1][0])

        # One finds its beginning in the other's first page, and writes what follows it, in other pieces than before.
        reader, shared_Y = 1 - writer, own_SPY[writer][0].clone()
        found_PY = [shared_Y, *(blank(layout) for _ in own_SPY[reader][1:])]
        written_sequence(side, found_PY, coef_STC[reader], rank_ST[reader], pieces[2], first=block_size)
        assert torch.equal(shared_Y, own_SPY[writer][0]), "nothing is written into what is shared"
        assert all(map(torch.equal, found_PY, own_SPY[reader]))
        for s, page_PY in ((writer, [shared_Y, *own_SPY[writer][1:]]), (reader, found_PY)):
            tokens = len(coef_STC[s])
            assert torch.equal(read_sequence(side, page_PY, tokens), read_sequence(side, own_SPY[s], tokens))


def test_rows_are_read_as_their_plan_rounds_them():
    for classes in (1, 4):
        side = layout_of(classes, margin=5.0).values
        coef_NC = coefficients(20)
        page_Y = torch.zeros(layout_of(classes, margin=5.0).page_bytes, dtype=torch.uint8)
        assert write_rows(side, page_Y, 0, coef_NC, is_first=True) == 0
        plan = side.row_format
        expected_NR = (
            plan.rounded(coef_NC[:, : plan.num_coefficients])
            if isinstance(plan, BitPlan)
            else plan.rounded(coef_NC, plan.classes(coef_NC))
        )
        torch.testing.assert_close(read_rows(side, page_Y, 20), expected_NR)


def test_rows_with_ranks_are_read_as_their_quantization_rounds_them():
    for name, rows in RANKED.items():
        side, rank_N, coef_NC = layout_of(name, margin=5.0).values, ranks(rows, 20), coefficients(20)
        page_Y = torch.zeros(layout_of(name, margin=5.0).page_bytes, dtype=torch.uint8)
        assert write_rows(side, page_Y, 0, coef_NC, is_first=True, rank_N=rank_N) == 0
        kept_N = [rows.num_coefficients] * 20 if rank_N is None else rank_N.tolist()
        for found_R, coef_C, kept in zip(read_rows(side, page_Y, 20), coef_NC, kept_N, strict=True):
            expected_1R = coef_C[None, :kept].to(rows.dtype).float()
            if rows.quantization is not None:
                expected_1R = rows.quantization.decode(*rows.quantization.encode(expected_1R), kept, torch.float32)
            assert torch.equal(found_R[:kept], expected_1R[0])
            assert not found_R[kept:].any()


def test_full_pages_fall_to_cheaper_classes_and_hold_every_token():
    layout = layout_of(4, num_sinks=0, margin=0.0)
    side = layout.keys
    wanting_NC = coefficients(32)
    wanting_NC += 3 * side.row_format.gate.linear_C  # all of them ask for much
    assert side.row_format.classes(wanting_NC).min() == 3
    page_Y = blank(layout)
    cut = written(side, page_Y, wanting_NC, [5, 9], False)
    held = levels_of(side, page_Y, 32)
    assert 0 < cut < 32
    assert held == sorted(held, reverse=True)
    assert bytes_of(side, held) <= side.row_room(is_first=False)


def test_sinks_leave_room_in_first_pages_and_give_it_to_rows_in_others():
    side = layout_of(4, block_size=128, num_sinks=4, margin=0.0).keys
    assert side.row_capacity(is_first=True) == 124
    assert side.sinks + 4 * WIDTH * 4 <= side.end
    assert side.row_room(is_first=False) > side.row_room(is_first=True)


def test_a_page_of_one_plan_has_no_header():
    layout = layout_of(1, block_size=128, num_sinks=0)
    size = layout.keys.rows.size(0)
    assert layout.keys.first_row == 0
    assert layout.page_bytes <= -(-(2 * 128 * size + 64) // 128) * 128


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_sinks": 32}, "num_sink_tokens"),
        ({"margin": -0.1}, "page_margin"),
    ],
)
def test_mistakes_are_named(changed, message):
    with pytest.raises(UserError, match=message):
        layout_of(4, **changed)


def test_pages_hold_only_rows():
    with pytest.raises(UserError, match="not of NoneType"):
        PageLayout.of(None, plan_of(1), block_size=32, num_sinks=0, sink_bytes=64)


def test_classes_must_grow():
    plans = plan_of(2)
    import dataclasses

    shrinking = dataclasses.replace(plans, plans=plans.plans[::-1])
    with pytest.raises(UserError, match="more bytes"):
        PageLayout.of(shrinking, BitPlan((2,), LEVELS), block_size=32, num_sinks=0, sink_bytes=64)
