"""One call for a layer's part of a step that decodes, against the calls that it is made of: the same bytes and outputs."""

import pytest
import torch
from paged_rows import HEAD_DIM, HEADS, WIDTH, layout_of
from written_pages import MOST, Written

from lowrank_kv.ops import native
from lowrank_kv.ops.layer_attention import LayerAttention
from lowrank_kv.ops.native.page_decoders import PageDecoders
from lowrank_kv.ops.native.pages import Sequences
from lowrank_kv.ops.native.projection import Projection
from lowrank_kv.ops.native.serving import ServedLayer, ServedTokens
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring

QUERY_HEADS, SCALING = 6, 0.25
LENGTHS = [70, 33, 3]  # of which the last token of each is new


class Case:
    """The last tokens of some sequences, whose others are in pages already."""

    def __init__(
        self,
        classes: int,
        dtype: torch.dtype,
        *,
        sees_itself: bool = True,
        head_dim: int = HEAD_DIM,
        first_byte: int = 0,
    ):
        layout = layout_of(classes, num_sinks=2, itemsize=dtype.itemsize, head_dim=head_dim)
        first_page = -(-first_byte // layout.page_bytes)
        self.tokens = Written(layout, LENGTHS, dtype, head_dim=head_dim, first_page=first_page)
        self.tokens.write([(b, 0, length - 1) for b, length in enumerate(LENGTHS)])
        generator = torch.Generator().manual_seed(3)
        ranks = [side.row_format.num_coefficients for side in (layout.keys, layout.values)]
        frequency_F = torch.logspace(0, -4, head_dim // 2)  # of which some turn slowly
        angle_XF = torch.arange(MOST)[:, None] * frequency_F
        rotary = RotaryTable(angle_XF.cos()[None], angle_XF.sin()[None], native.slow_from(frequency_F))
        back = angle_XF.cos(), -angle_XF.sin()
        width = HEADS * head_dim
        key_CR, value_CR = (torch.randn(width, WIDTH, generator=generator) / width**0.5 for _ in range(2))
        self.projection = Projection(key_CR, value_CR, back, num_kv_heads=HEADS)
        decoders = [(torch.randn(rank, width, generator=generator) / 6).to(dtype) for rank in ranks]
        in_c = PageDecoders(*decoders, head_dim=head_dim if dtype == torch.bfloat16 else None)
        self.attention = LayerAttention(in_c, rotary, Scoring(SCALING), sees_itself)
        self.new = self.tokens.step([(b, length - 1, length) for b, length in enumerate(LENGTHS)])[0]
        count = len(LENGTHS)
        first_B, length_B = torch.arange(count + 1).int(), torch.tensor(LENGTHS, dtype=torch.int32)
        self.sequences, self.served_N = Sequences(first_B, length_B, self.tokens.page_BP), torch.arange(count)
        self.query_THD = torch.randn(count, QUERY_HEADS, head_dim, generator=generator).to(dtype)

    def in_three_calls(self) -> tuple[int, torch.Tensor]:
        cut = self.tokens.pages.write(self.new, *self.projection(self.new))
        output_THD = torch.empty(self.query_THD.shape)
        self.tokens.pages.attend(self.query_THD, self.new, self.sequences, self.served_N, self.attention, output_THD)
        return cut, output_THD.to(self.query_THD.dtype)

    def in_one_call(self, query_THD: torch.Tensor, output_THD: torch.Tensor) -> int | None:
        layer = ServedLayer(self.tokens.pages, self.projection, self.attention, num_heads=QUERY_HEADS)
        step = ServedTokens(self.new.position_T, self.new.slot_T, self.sequences, self.served_N)
        return layer(query_THD, self.new.key_TGD, self.new.value_TGD, step, output_THD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [1, 4])
@pytest.mark.parametrize("sees_itself", [True, False])
@pytest.mark.parametrize("head_dim", [HEAD_DIM, 64])
def test_one_call_does_what_three_do(dtype, classes, sees_itself, head_dim):
    one, three = (Case(classes, dtype, sees_itself=sees_itself, head_dim=head_dim) for _ in range(2))
    output_THD = torch.full(one.query_THD.shape, 9.0, dtype=dtype)
    cut, (expected_cut, expected_THD) = one.in_one_call(one.query_THD, output_THD), three.in_three_calls()
    assert cut == expected_cut
    assert torch.equal(one.tokens.page_XY, three.tokens.page_XY)
    assert torch.equal(output_THD, expected_THD)


def test_pages_may_lie_beyond_two_gibibytes():
    """Where an offset has more than 32 bits."""
    near, far = (Case(4, torch.float32, first_byte=first) for first in (0, 1 << 31))
    outputs = [each.in_three_calls()[1] for each in (near, far)]
    pages, first = len(near.tokens.page_XY), len(far.tokens.page_XY) - len(near.tokens.page_XY)
    assert first * far.tokens.page_XY.stride(0) > 1 << 31
    assert torch.equal(*outputs)
    assert torch.equal(far.tokens.page_XY[first:], near.tokens.page_XY)
    for b, length in enumerate(LENGTHS):
        rows = [each.tokens.pages.rows(each.tokens.page_BP[b], length - 2) for each in (near, far)]
        assert all(map(torch.equal, *rows))
    assert pages > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_may_lie_apart(dtype):
    """As the queries of a fused product do."""
    one, three = (Case(4, dtype) for _ in range(2))
    fused_TXD = torch.full((len(LENGTHS), QUERY_HEADS + 3, HEAD_DIM), torch.nan, dtype=dtype)
    query_THD, output_THD = fused_TXD[:, 1:-2], torch.full_like(fused_TXD, 9.0)
    query_THD.copy_(one.query_THD)
    assert one.in_one_call(query_THD, output_THD[:, 2:-1]) is not None
    assert torch.equal(output_THD[:, 2:-1], three.in_three_calls()[1])
    assert (output_THD[:, [0, 1, -1]] == 9).all()


def test_what_is_not_one_call_does_nothing():
    for dtype, change in (
        (torch.float32, lambda states: states.bfloat16()),
        (torch.float32, lambda states: states.repeat(1, 2, 1)[:, ::2]),
        (torch.bfloat16, lambda states: states.repeat_interleave(2, dim=2)[:, :, ::2]),
    ):
        case = Case(4, dtype)
        before_XY = case.tokens.page_XY.clone()
        for query_THD, output_THD in (
            (change(case.query_THD), torch.empty_like(case.query_THD)),
            (case.query_THD, change(torch.full_like(case.query_THD, 9.0))),
        ):
            assert case.in_one_call(query_THD, output_THD) is None
        assert torch.equal(case.tokens.page_XY, before_XY)
