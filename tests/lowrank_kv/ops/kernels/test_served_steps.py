"""A server's steps on one layer's pages, by kernels and by compiled code: what a step writes is read by the next one."""

import pytest
import torch
from errors import check_near
from layer_attentions import layer_attentions
from paged_rows import HEAD_DIM, HEADS, WIDTH, layout_of
from written_pages import Written

from lowrank_kv.ops.arena_append.triton import PageWriter
from lowrank_kv.ops.arena_attention.page_reader import PageReader
from lowrank_kv.ops.native.pages import NewTokens, Sequences

QUERY_HEADS, STEPS = 4, 4


@pytest.mark.parametrize(("row_format", "sees_itself"), [(1, True), (4, True), ("floats", False)])
def test_steps_that_write_and_attend_are_those_of_compiled_code(device, generator, row_format, sees_itself):
    """Prompts are written first. Then each sequence gets a token a step, one of them beginning a page."""
    lengths = [32 + STEPS, 7 + STEPS]
    tokens = Written(layout_of(row_format), lengths)
    page_XY = tokens.page_XY.to(device, copy=True)
    shape = {"num_kv_heads": HEADS, "head_dim": HEAD_DIM, "dtype": torch.float32}
    reader, writer = PageReader(page_XY, tokens.layout, **shape), PageWriter(page_XY, tokens.layout)
    sides = tokens.layout.keys, tokens.layout.values
    decoders = [torch.randn(side.row_format.num_coefficients, WIDTH, generator=generator) / 6 for side in sides]
    in_c, on_device = layer_attentions(decoders, device, generator, sees_itself=sees_itself)
    served_N, cut = torch.tensor([0, 1]), 0

    def write(spans: list[tuple[int, int, int]]) -> NewTokens:
        nonlocal cut
        new, coefs, ranks = tokens.step(spans)
        cut += tokens.pages.write(new, *coefs, ranks)
        asked = None if ranks is None else tuple(each.to(device) for each in ranks)
        writer.write(on(device, new), *(each.to(device) for each in coefs), asked)
        return new

    write([(b, 0, length - STEPS) for b, length in enumerate(lengths)])
    for step in range(STEPS):
        now = [length - STEPS + step for length in lengths]
        new = write([(b, at, at + 1) for b, at in enumerate(now)])
        sequences = Sequences(
            torch.arange(3, dtype=torch.int32), torch.tensor(now, dtype=torch.int32) + 1, tokens.page_BP
        )
        query_THD = torch.randn(2, QUERY_HEADS, HEAD_DIM, generator=generator)
        expected_THD = torch.empty_like(query_THD)
        tokens.pages.attend(query_THD, new, sequences, served_N, in_c, expected_THD)
        found_THD = torch.empty_like(query_THD, device=device)
        reader.attend(
            query_THD.to(device), on(device, new), on(device, sequences), served_N.to(device), on_device, found_THD
        )
        check_near(found_THD.cpu(), expected_THD, torch.float32)
    assert torch.equal(page_XY.cpu(), tokens.page_XY)
    assert int(writer.cut) == cut


def on(device: torch.device, tensors: NewTokens | Sequences) -> NewTokens | Sequences:
    return type(tensors)(*(each.to(device) for each in tensors))
