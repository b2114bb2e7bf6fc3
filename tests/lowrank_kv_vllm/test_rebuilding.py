"""What a prompt reads of earlier tokens is rebuilt in tiles, to the bit as it would be at once."""

import types

import pytest
import torch
from served_engines import prompt_of, served, serving, texts

from lowrank_kv.ops import native
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv_vllm import backend, prompts
from lowrank_kv_vllm.backend import TILE, PagedAttention, tiles
from lowrank_kv_vllm.prompts import BLOCK, PromptPages
from lowrank_kv_vllm.step import Prompt

HEADS, DIM, RANK, SINKS = 4, 64, 75, 1


@pytest.mark.parametrize("count", [1, TILE - 1, TILE, TILE + 1, 2 * TILE - 1, 2 * TILE, 3 * TILE + 1])
def test_tiles_follow_one_another_and_none_is_small(count):
    found = tiles(count, TILE)
    assert found[0].start == 0
    assert found[-1].stop == count
    assert all(one.stop == other.start for one, other in zip(found, found[1:], strict=False))
    assert all(min(count, TILE) <= each.stop - each.start < 2 * TILE for each in found)


def rebuilding(past: int, dtype: torch.dtype) -> tuple[PagedAttention, dict[str, torch.Tensor]]:
    """A layer whose pages hold random rows, and these."""
    generator = torch.Generator().manual_seed(past)
    sizes = {"row": (2, past - SINKS, RANK), "decoder": (2, RANK, HEADS * DIM), "sink": (2, SINKS, HEADS, DIM)}
    made = {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}
    frequency_F = 1e4 ** (-torch.arange(0, DIM, 2) / DIM)
    angle_TF = torch.arange(past)[:, None] * frequency_F
    table = RotaryTable(angle_TF.cos()[None], angle_TF.sin()[None], native.slow_from(frequency_F))
    attention = PagedAttention(HEADS, DIM, DIM**-0.5)
    attention._dtype, attention._rotation = dtype, table
    attention._served = types.SimpleNamespace(num_sinks=SINKS)
    attention._key, attention._value = (types.SimpleNamespace(decoder_RC=each) for each in made["decoder"])
    attention._pages = types.SimpleNamespace(
        sinks=lambda page_P, count: tuple(made["sink"][:, :count]),
        rows=lambda page_P, count: tuple(made["row"][:, :count]),
    )
    return attention, made


def pages_of(prompts: list[Prompt], dtype: torch.dtype) -> list[PromptPages]:
    return PromptPages.of(prompts, num_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("past", [SINKS, SINKS + 1, 300, 2 * TILE + SINKS + 1, 3 * TILE + 500])
def test_pages_hold_what_they_would_at_once(past, dtype):
    attention, made = rebuilding(past, dtype)
    key_TGD, value_TGD = (
        torch.cat([sink, (row @ decoder).unflatten(1, (HEADS, DIM))])
        for row, decoder, sink in zip(made["row"], made["decoder"], made["sink"], strict=True)
    )
    key_TGD[SINKS:] = backend.rotated(attention._rotation, key_TGD[SINKS:], torch.arange(SINKS, past)).to(dtype)
    at_once, in_tiles = (pages_of([Prompt(0, slice(0, 3), past)], dtype)[0] for _ in range(2))
    for each in (at_once, in_tiles):
        each._memory.zero_()
    at_once.hold(0, 0, key_TGD, value_TGD)
    firsts = []
    for first, *states in attention._rebuilt(torch.zeros(1, dtype=torch.int32), past):
        firsts.append(first)
        in_tiles.hold(0, first, *states)
    assert torch.equal(in_tiles._memory, at_once._memory)
    assert firsts == [0, *(SINKS + tile.start for tile in tiles(past - SINKS, TILE))][: len(firsts)]
    assert len(firsts) == 1 + max(0, (past - SINKS) // TILE, past > SINKS)


@pytest.mark.parametrize("prefill", ["exact", "reconstructed"])
def test_texts_do_not_depend_on_tiles(files, monkeypatch, prefill):
    prompt, settings = prompt_of(200, 3), {"prefill": prefill}
    monkeypatch.setattr(backend, "TILE", 16)
    with serving(files, {**files.settings, **settings}) as engine:
        assert texts(served(engine, [prompt])) == [files.generated(prompt, **settings)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_take_turns_in_little_memory(monkeypatch, dtype):
    """Whoever read before in the same memory, also where that left what are no numbers."""
    spans = [(3, 300), (40, 0), (1, 260), (7, 1000), (200, 5)]
    starts = [sum(new for new, _ in spans[:i]) for i in range(len(spans))]
    read = [Prompt(i, slice(starts[i], starts[i] + new), past) for i, (new, past) in enumerate(spans)]
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(3, 251, HEADS, DIM, generator=generator).to(dtype)
    earlier = {i: torch.randn(2, past, HEADS, DIM, generator=generator).to(dtype) for i, (_, past) in enumerate(spans)}
    page_bytes = 2 * BLOCK * HEADS * DIM * dtype.itemsize
    found = []
    for most_pages, sizes in ((100, [5]), (4, [2, 1, 1, 1])):
        monkeypatch.setattr(prompts, "MOST_BYTES", most_pages * page_bytes)
        groups, output_THD = pages_of(read, dtype), torch.full_like(state[0], torch.nan)
        assert [len(group.prompts) for group in groups] == sizes
        groups[0]._memory.fill_(torch.nan)
        for group in groups:
            assert group._memory.data_ptr() == groups[0]._memory.data_ptr()
            for i, prompt in enumerate(group.prompts):
                group.hold(i, 0, *earlier[prompt.sequence])
            group.hold_new(*state[1:])
            group.attend(state[0], output_THD, scale=DIM**-0.5)
        found.append(output_THD)
    torch.testing.assert_close(*found)
    for prompt in read:
        key_KGD, value_KGD = torch.cat([earlier[prompt.sequence], state[1:, prompt.new]], dim=1).double()
        seen, tokens = len(key_KGD), prompt.new.stop - prompt.new.start
        expected_HTD = torch.nn.functional.scaled_dot_product_attention(
            state[0, prompt.new].double().transpose(0, 1),
            key_KGD.transpose(0, 1),
            value_KGD.transpose(0, 1),
            attn_mask=torch.ones(tokens, seen, dtype=torch.bool).tril(seen - tokens),
        )
        most = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found[1][prompt.new].double(), expected_HTD.transpose(0, 1), rtol=most, atol=most)


def test_texts_do_not_depend_on_turns(files, monkeypatch):
    prompts_of_all = [prompt_of(length, length) for length in (60, 30, 38)]  # one step reads them
    monkeypatch.setattr(prompts, "MOST_BYTES", 1)
    with serving(files, files.settings) as engine:
        found = texts(served(engine, prompts_of_all))
    assert found == [files.generated(prompt, chunk=[len(prompt)]) for prompt in prompts_of_all]
