"""Decode attention over a server's pages against the fp64 reference."""

import pytest
import torch
from errors import check_near
from even_levels import LEVELS
from paged_rows import HEAD_DIM, HEADS, RANKED, WIDTH, layout_of
from written_pages import MOST, Written

from lowrank_kv.ops.arena_attention.operands import ArenaPages
from lowrank_kv.ops.arena_attention.reference import arena_attention as reference
from lowrank_kv.ops.arena_attention.triton import arena_attention
from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.stores.arena import PageLayout, write_rows
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.quantization import IntegerQuantization
from lowrank_kv.stores.ranked_rows import RankedRows
from lowrank_kv.utils.errors import UserError

QUERY_HEADS = 4
FORMATS = [1, 2, 4, *RANKED]
CASES = {
    "several sequences, pages in part": {"lengths": [70, 33]},
    "one row, and no row": {"lengths": [2, 1], "num_sinks": 0},
    "without sinks, capped": {"lengths": [65], "num_sinks": 0, "softcap": 5.0},
    "sinks and the new token alone": {"lengths": [5, 3], "num_sinks": 4},
    "its own row": {"lengths": [70, 1], "num_sinks": 0, "sees_itself": False},
    "its own row behind sinks": {"lengths": [35, 2], "sees_itself": False},
    "pages of several tiles": {"lengths": [161], "block_size": 128},
    "pages that fill no tile": {"lengths": [100], "block_size": 48},
    "pages of tiles and a part": {"lengths": [200], "block_size": 96, "num_sinks": 3},
    "full pages": {"lengths": [64, 32], "sees_itself": False},
    "one part": {"lengths": [70], "splits": 1},
    "more parts than tiles": {"lengths": [40], "splits": 5},
    "half of a head rotated": {"lengths": [50], "pairs": 4},
}
# The interpreter takes seconds for each: every case for rows of classes, and every kind of rows for the first case.
QUICK, SLOW = 4, [2, "floats", "int4"]


class Decoding:
    """Sequences whose last token is new, and what attends to them."""

    def __init__(
        self, row_format, dtype, generator, *, lengths, block_size=32, num_sinks=2, softcap=None, sees_itself=True,
        splits=2, pairs=HEAD_DIM // 2,
    ):  # fmt: skip
        layout = layout_of(row_format, block_size=block_size, num_sinks=num_sinks, itemsize=dtype.itemsize)
        self.tokens = Written(layout, lengths, dtype)
        # Numbers that are not finite, and levels of the largest rows, stand wherever nothing is written.
        self.tokens.page_XY.fill_(0xFF)
        spans = [(b, 0, length - sees_itself) for b, length in enumerate(lengths)]
        self.tokens.write([span for span in spans if span[2]])
        ranks = [side.row_format.num_coefficients for side in (layout.keys, layout.values)]
        self.decoders = Decoders(*((torch.randn(rank, WIDTH, generator=generator) / 6).to(dtype) for rank in ranks))
        angle_XF = torch.rand(MOST, pairs, generator=generator) * 6
        self.rotation = angle_XF.cos(), angle_XF.sin()
        self.query_BHD = torch.randn(len(lengths), QUERY_HEADS, HEAD_DIM, generator=generator).to(dtype)
        self.new_BGD = None
        if sees_itself:
            self.new_BGD = [torch.stack([states[-1] for states in side]) for side in self.tokens.state_SBTGD]
        self.past_B = torch.tensor(lengths, dtype=torch.int32) - int(sees_itself)
        self.scoring, self.splits = Scoring(0.25, softcap), splits
        self.table = RotaryTable(*(each_XF[None] for each_XF in self.rotation))

    def pages(self, device):
        tokens = self.tokens
        return ArenaPages(tokens.page_XY.to(device), tokens.layout, HEADS, HEAD_DIM, tokens.dtype)

    def expected(self):
        return reference(
            self.query_BHD.double(), self.pages("cpu"), self.tokens.page_BP, self.past_B, self.decoders,
            self.scoring, rotation=self.table, new_BGD=self.new_BGD,
        )  # fmt: skip

    def actual(self, device):
        decoders = Decoders(self.decoders.key_CC.to(device), self.decoders.value_CC.to(device))
        return arena_attention(
            self.query_BHD.to(device),
            self.pages(device),
            self.tokens.page_BP.to(device),
            self.past_B.to(device),
            decoders,
            self.scoring,
            rotation=RotaryTable(self.table.cos_BTF.to(device), self.table.sin_BTF.to(device)),
            new_BGD=None if self.new_BGD is None else tuple(each.to(device) for each in self.new_BGD),
            splits=self.splits,
        ).cpu()


@pytest.mark.parametrize("row_format", FORMATS)
def test_rows_of_every_kind(device, generator, row_format):
    found = Decoding(row_format, torch.float32, generator, **CASES["several sequences, pages in part"])
    check_near(found.actual(device), found.expected(), torch.float32)


@pytest.mark.parametrize("row_format", [QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_reference(device, generator, case, row_format):
    found = Decoding(row_format, torch.float32, generator, **case)
    check_near(found.actual(device), found.expected(), torch.float32)


@pytest.mark.parametrize("row_format", [1, "halves", "fixed"])
def test_in_bf16(device, generator, row_format):
    found = Decoding(row_format, torch.bfloat16, generator, **CASES["several sequences, pages in part"])
    check_near(found.actual(device), found.expected(), torch.bfloat16)


# An odd number, of which 4 bits leave half a byte.
_WIDE = {"num_coefficients": 91, "granularity": None, "mean_row_bytes": 360.0, "dtype": torch.float32}


@pytest.mark.parametrize(
    "row_format",
    [
        RankedRows(**_WIDE),
        RankedRows(**_WIDE, quantization=IntegerQuantization(bits=4, group_size=7)),
        BitPlan((16,) * 3 + (5,) * 40 + (3,) * 27 + (1,) * 21, LEVELS),
    ],
    ids=["floats", "int4 in groups", "a plan"],
)
def test_more_coefficients_than_are_read_at_once(device, generator, row_format):
    """Rows that the plain form has written, in heads of 24 dims, without exact tokens and without a rotation."""
    groups, head_dim, tokens = 4, 24, 37
    layout = PageLayout.of(row_format, row_format, block_size=32, num_sinks=0, sink_bytes=0)
    page_XY = torch.full((3, layout.page_bytes), 0xFF, dtype=torch.uint8)
    page_BP = torch.tensor([[2, 0]], dtype=torch.int32)
    for side in (layout.keys, layout.values):
        coef_TC = torch.randn(tokens, groups * head_dim, generator=generator)
        for p, coef_NC in enumerate(coef_TC[:, : row_format.num_coefficients].split(32)):
            write_rows(side, page_XY[page_BP[0, p]], 0, coef_NC, is_first=p == 0)
    decoders = [torch.randn(91, groups * head_dim, generator=generator) / 10 for _ in range(2)]
    query_BHD = torch.randn(1, groups, head_dim, generator=generator)
    past_B = torch.tensor([tokens], dtype=torch.int32)

    def run(attention, query_BHD, device):
        pages = ArenaPages(page_XY.to(device), layout, groups, head_dim, torch.float32)
        own = Decoders(*(each.to(device) for each in decoders))
        return attention(query_BHD.to(device), pages, page_BP.to(device), past_B.to(device), own, Scoring(0.25)).cpu()

    check_near(run(arena_attention, query_BHD, device), run(reference, query_BHD.double(), "cpu"), torch.float32)


def test_sequences_share_pages(device, generator):
    """The second reads the first one's first page, and then goes its own way."""
    found = Decoding(4, torch.float32, generator, lengths=[70, 70])
    found.tokens.page_BP[1, 0] = found.tokens.page_BP[0, 0]
    actual = found.actual(device)
    check_near(actual, found.expected(), torch.float32)
    assert not torch.allclose(actual[0], actual[1])


@pytest.mark.parametrize("sees_itself", [True, False])
def test_sequences_without_tokens_get_nothing(device, generator, sees_itself):
    """A captured graph serves as many sequences as it was captured for; those that are not there have no length."""
    found = Decoding(4, torch.float32, generator, lengths=[40, 33], sees_itself=sees_itself)
    expected = found.expected()[:1]
    found.past_B[1] = -1 if sees_itself else 0
    actual = found.actual(device)
    check_near(actual[:1], expected, torch.float32)
    assert not actual[1].any()


def test_queries_of_another_type_are_refused(device, generator):
    found = Decoding(1, torch.float32, generator, lengths=[20])
    found.query_BHD = found.query_BHD.bfloat16()
    with pytest.raises(UserError, match="query_BHD"):
        found.actual(device)


def test_a_table_for_each_sequence_is_refused(device, generator):
    found = Decoding(1, torch.float32, generator, lengths=[20, 5])
    found.table = RotaryTable(*(each_XF.expand(2, -1, -1) for each_XF in found.rotation))
    with pytest.raises(UserError, match="one table of angles"):
        found.actual(device)


@pytest.mark.parametrize("apart", [2, 3])
def test_pages_at_odd_addresses_are_refused(generator, apart):
    found = Decoding(1, torch.float32, generator, lengths=[20])
    page_XY = torch.zeros(4, found.tokens.layout.page_bytes + apart, dtype=torch.uint8)
    with pytest.raises(UserError, match="multiple of 4"):
        ArenaPages(page_XY, found.tokens.layout, HEADS, HEAD_DIM, torch.float32)


def test_pages_smaller_than_their_layout_are_refused(generator):
    found = Decoding(1, torch.float32, generator, lengths=[20])
    page_XY = torch.zeros(4, found.tokens.layout.page_bytes - 4, dtype=torch.uint8)
    with pytest.raises(UserError, match="bytes or more"):
        ArenaPages(page_XY, found.tokens.layout, HEADS, HEAD_DIM, torch.float32)
