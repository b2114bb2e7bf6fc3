"""Compiled pages against the plain ones: the same bytes written, the same rows read, and attention over them in fp64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_rows import FORMS, HEAD_DIM, HEADS, LAYOUTS, RANKED, coefficients, layout_of
from torch import Tensor
from written_pages import MOST, Written

from lowrank_kv.ops.layer_attention import LayerAttention
from lowrank_kv.ops.native.page_decoders import PageDecoders
from lowrank_kv.ops.native.pages import NewTokens, Sequences
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.stores.arena import read_rows
from lowrank_kv.utils.errors import UserError

QUERY_HEADS = 6


@settings(deadline=None, max_examples=25)
@given(
    classes=FORMS,
    layout=LAYOUTS,
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    pieces=st.lists(st.integers(1, 60), min_size=0, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_bytes_are_those_of_the_plain_form(classes, layout, lengths, pieces, dtype):
    block_size, num_sinks, margin = layout
    layout = layout_of(classes, block_size=block_size, num_sinks=num_sinks, margin=margin, itemsize=dtype.itemsize)
    tokens = Written(layout, lengths, dtype)
    expected_XY, expected_cut = tokens.plain()
    cut, done = 0, 0
    for piece in [*pieces, max(lengths)]:
        spans = [(b, min(done, n), min(done + piece, n)) for b, n in enumerate(lengths) if done < n]
        cut += tokens.write(spans) if spans else 0
        done += piece
    assert torch.equal(tokens.page_XY, expected_XY)
    assert cut == expected_cut
    for b, length in enumerate(lengths):
        if length > num_sinks:
            for which, found_NR in enumerate(tokens.pages.rows(tokens.page_BP[b], length - num_sinks)):
                torch.testing.assert_close(found_NR, tokens.rows(which, b, length - num_sinks))
        for found, states in zip(
            tokens.pages.sinks(int(tokens.page_BP[b, 0]), min(length, num_sinks)), tokens.state_SBTGD, strict=True
        ):
            assert torch.equal(found, states[b][:num_sinks])


@pytest.mark.parametrize("classes", ["int8", "int4", "fixed"])
def test_a_coefficient_that_is_no_number_is_none_afterwards(classes):
    """As in the plain form; it must not become one that looks right."""
    tokens = Written(layout_of(classes, num_sinks=0), [5])
    tokens.coef_SBTC[0][0][3, 2] = torch.nan
    tokens.rank_SBT = [[None if rank_T is None else torch.full_like(rank_T, 30)] for [rank_T] in tokens.rank_SBT]
    tokens.write_all()
    is_nan_TR = tokens.rows(0, 0, 5).isnan()
    assert is_nan_TR[3, 2]
    assert not is_nan_TR[[0, 1, 2, 4]].any()
    assert torch.equal(tokens.pages.rows(tokens.page_BP[0], 5)[0].isnan(), is_nan_TR)
    plain_XY = tokens.plain()[0]
    side = tokens.layout.keys
    assert torch.equal(read_rows(side, plain_XY[tokens.page_BP[0, 0]], 5).isnan(), is_nan_TR)


def test_tokens_without_a_place_are_not_written():
    tokens = Written(layout_of(4), [10])
    before = tokens.page_XY.clone()
    states = torch.zeros(3, HEADS, HEAD_DIM)
    tokens.pages.write(
        NewTokens(states, states, torch.arange(3), torch.full((3,), -1)), coefficients(3), coefficients(3)
    )
    assert torch.equal(tokens.page_XY, before)


def test_a_sequence_of_sinks_alone_has_no_rows():
    """In a process whose memory holds anything but zeros before it is written."""
    script = """
import torch
from paged_rows import layout_of
from written_pages import Written
tokens = Written(layout_of(4), [2])
tokens.write_all()
for row_NR in tokens.pages.rows(tokens.page_BP[0], 0):
    assert row_NR.shape[0] == 0
"""
    tests = Path(__file__).parents[2]
    environment = {**os.environ, "MALLOC_PERTURB_": "165", "PYTHONPATH": f"{tests}:{tests.parent}"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def dense(
    tokens: Written, b: int, query_QHD: Tensor, new: int, decoders, cos_XF, sin_XF, scaling, softcap, sees_itself=True
) -> Tensor:
    """Attention of a sequence's last `new` tokens in fp64: sinks and new tokens exact, the others rebuilt."""
    past = tokens.lengths[b] - new if sees_itself else tokens.lengths[b]
    states = []
    for which in range(2):
        exact_TGD = tokens.state_SBTGD[which][b].double()
        sinks = min(past, tokens.sinks)
        row_NR = tokens.rows(which, b, past - sinks).double()
        rebuilt_NGD = (row_NR @ decoders[which].double()).unflatten(1, (HEADS, tokens.head_dim))
        if which == 0:
            cos_NF, sin_NF = (table[sinks:past, None].double() for table in (cos_XF, sin_XF))
            first, second = rebuilt_NGD.chunk(2, dim=-1)
            rebuilt_NGD = torch.cat([first * cos_NF - second * sin_NF, second * cos_NF + first * sin_NF], dim=-1)
        states.append(torch.cat([exact_TGD[:sinks], rebuilt_NGD, exact_TGD[past:]]))
    key_TGD, value_TGD = (each.repeat_interleave(QUERY_HEADS // HEADS, dim=1) for each in states)
    score_HQT = torch.einsum("qhd,thd->hqt", query_QHD.double(), key_TGD) * scaling
    if softcap is not None:
        score_HQT = softcap * torch.tanh(score_HQT / softcap)
    sees_QT = torch.ones(new, len(key_TGD), dtype=torch.bool).tril(len(key_TGD) - new)
    return torch.einsum("hqt,thd->qhd", score_HQT.masked_fill(~sees_QT, -torch.inf).softmax(-1), value_TGD)


@pytest.mark.parametrize("classes", [1, 4, *RANKED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "new", "num_sinks", "softcap", "sees_itself", "head_dim"),
    [
        ([70], [1], 2, None, True, HEAD_DIM),
        ([150, 33, 3, 97], [1, 2, 1, 3], 2, None, True, HEAD_DIM),
        ([150, 33, 3, 97], [1, 2, 1, 3], 1, None, True, 64),  # which processors with wide registers read otherwise
        ([130, 65], [1, 1], 0, 5.0, True, HEAD_DIM),
        ([130, 65], [12, 9], 2, None, True, HEAD_DIM),
        ([5, 1], [1, 1], 4, None, True, HEAD_DIM),
        ([150, 33, 1], [1, 1, 1], 0, None, False, HEAD_DIM),
        ([150, 33, 1], [1, 1, 1], 1, None, False, 64),
    ],
)
def test_attention_is_that_of_rebuilt_tokens(classes, dtype, lengths, new, num_sinks, softcap, sees_itself, head_dim):
    layout = layout_of(classes, num_sinks=num_sinks, itemsize=dtype.itemsize, head_dim=head_dim)
    tokens = Written(layout, lengths, dtype, head_dim=head_dim)
    tokens.write_all()
    generator = torch.Generator().manual_seed(3)
    decoders = [
        (torch.randn(side.row_format.num_coefficients, HEADS * head_dim, generator=generator) / 6).to(dtype)
        for side in (tokens.layout.keys, tokens.layout.values)
    ]
    angle_XF = torch.rand(MOST, head_dim // 2, generator=generator) * 6
    cos_XF, sin_XF = angle_XF.cos(), angle_XF.sin()
    query_THD = torch.randn(sum(new), QUERY_HEADS, head_dim, generator=generator).to(dtype)
    scaling = head_dim**-0.5
    key_TGD, value_TGD = (
        torch.cat([states[b][-count:] for b, count in enumerate(new)]) for states in tokens.state_SBTGD
    )
    first_B = torch.tensor([0, *new]).cumsum(0).int()
    output_THD = torch.full((sum(new), QUERY_HEADS, head_dim), 9.0)
    served_N = torch.arange(len(lengths))[: max(1, len(lengths) - 1)]  # the last is not served
    tokens.pages.attend(
        query_THD,
        NewTokens(key_TGD, value_TGD, torch.empty(0), torch.empty(0)),
        Sequences(first_B, torch.tensor(lengths, dtype=torch.int32), tokens.page_BP),
        served_N,
        LayerAttention(
            PageDecoders(*decoders, head_dim=head_dim if dtype == torch.bfloat16 and classes not in RANKED else None),
            RotaryTable(cos_XF[None], sin_XF[None]),
            Scoring(scaling, softcap),
            sees_itself,
        ),
        output_THD,
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for b in served_N.tolist():
        rows = slice(first_B[b], first_B[b + 1])
        expected = dense(tokens, b, query_THD[rows], new[b], decoders, cos_XF, sin_XF, scaling, softcap, sees_itself)
        torch.testing.assert_close(output_THD[rows].double(), expected, atol=tolerance, rtol=tolerance)
    if len(lengths) > 1:
        assert (output_THD[first_B[-2] :] == 9).all()


def test_sinks_of_heads_are_refused():
    table_1XF = torch.ones(1, MOST, HEAD_DIM // 2)
    with pytest.raises(UserError, match="`scoring.sink_H` must be None for pages"):
        LayerAttention(None, RotaryTable(table_1XF, table_1XF), Scoring(0.25, sink_H=torch.zeros(QUERY_HEADS)))
