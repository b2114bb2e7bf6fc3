"""Pages read by kernels, as compiled code reads them: the same calls on the same bytes."""

import pytest
import torch
from errors import check_near
from layer_attentions import layer_attentions
from paged_rows import HEAD_DIM, HEADS, RANKED, WIDTH, layout_of
from written_pages import Written

from lowrank_kv.ops.arena_attention.page_reader import PageReader
from lowrank_kv.ops.native.pages import NewTokens, Sequences

QUERY_HEADS = 4


def written(row_format, lengths, dtype=torch.float32, **layout) -> Written:
    tokens = Written(layout_of(row_format, itemsize=dtype.itemsize, **layout), lengths, dtype)
    tokens.page_XY.fill_(0xFF)
    tokens.write_all()
    return tokens


def reader_of(tokens: Written, device: torch.device) -> PageReader:
    return PageReader(
        tokens.page_XY.to(device), tokens.layout, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=tokens.dtype
    )


@pytest.mark.parametrize("row_format", [1, 2, 4, *RANKED])
def test_rows_are_those_of_compiled_code(device, row_format):
    tokens = written(row_format, [70, 41])
    reader = reader_of(tokens, device)
    for b, count in ((0, 0), (0, 68), (1, 33)):
        page_P = tokens.page_BP[b]
        for found_NR, expected_NR in zip(
            reader.rows(page_P.to(device), count), tokens.pages.rows(page_P, count), strict=True
        ):
            torch.testing.assert_close(found_NR.cpu(), expected_NR, rtol=1e-6, atol=1e-7)


def test_rows_in_the_models_type(device):
    tokens = written(4, [40])
    found = reader_of(tokens, device).rows(tokens.page_BP[0].to(device), 38, torch.bfloat16)
    for found_NR, expected_NR in zip(found, tokens.pages.rows(tokens.page_BP[0], 38), strict=True):
        check_near(found_NR.cpu(), expected_NR, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_tokens_are_those_that_were_written(device, dtype):
    tokens = written(4, [70, 41], dtype, num_sinks=3)
    reader = reader_of(tokens, device)
    for b in range(2):
        page = int(tokens.page_BP[b, 0])
        for found_FGD, expected_FGD in zip(reader.sinks(page, 2), tokens.pages.sinks(page, 2), strict=True):
            assert torch.equal(found_FGD.cpu(), expected_FGD)


@pytest.mark.parametrize("sees_itself", [True, False])
@pytest.mark.parametrize(
    ("row_format", "dtype", "softcap"),
    [(4, torch.float32, None), (1, torch.bfloat16, 5.0), ("int4", torch.float32, None)],
)
def test_attention_is_that_of_compiled_code(device, generator, row_format, dtype, softcap, sees_itself):
    """Some sequences of a step are served, in another order than theirs; one that is not has several new tokens."""
    new = [1, 3, 1, 1]
    tokens = written(row_format, [40, 20, 33, 5], dtype)
    token_count = sum(new)
    query_THD = torch.randn(token_count, QUERY_HEADS, HEAD_DIM, generator=generator).to(dtype)
    states = [torch.cat([own[-n:] for own, n in zip(side, new, strict=True)]) for side in tokens.state_SBTGD]
    step = NewTokens(*states, torch.empty(0), torch.empty(0))
    sequences = Sequences(
        torch.tensor([0, *new]).cumsum(0).int(), torch.tensor(tokens.lengths, dtype=torch.int32), tokens.page_BP
    )
    served_N = torch.tensor([3, 0])
    ranks = [side.row_format.num_coefficients for side in (tokens.layout.keys, tokens.layout.values)]
    decoders = [(torch.randn(rank, WIDTH, generator=generator) / 6).to(dtype) for rank in ranks]
    in_c, on_device = layer_attentions(decoders, device, generator, sees_itself=sees_itself, softcap=softcap)
    expected_THD = torch.full((token_count, QUERY_HEADS, HEAD_DIM), 9.0)
    tokens.pages.attend(query_THD, step, sequences, served_N, in_c, expected_THD)
    found_THD = torch.full_like(expected_THD, 9.0, dtype=dtype, device=device)
    reader_of(tokens, device).attend(
        query_THD.to(device),
        NewTokens(*(each.to(device) for each in step)),
        Sequences(*(each.to(device) for each in sequences)),
        served_N.to(device),
        on_device,
        found_THD,
    )
    served, others = [0, 5], [1, 2, 3, 4]
    check_near(found_THD.cpu()[served], expected_THD[served], dtype)
    assert (found_THD.cpu()[others] == 9).all()
