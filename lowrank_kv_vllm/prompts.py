"""Attention of many new tokens, by the kernel that stock vLLM uses, over pages that last for one layer.

A prompt's new tokens see each other exactly. So a layer writes them into pages of uncompressed states, behind what was
rebuilt of tokens that earlier steps read, and forgets them when they have been attended. Requests that begin alike have one
prefix in vLLM's cache, and each has its own copy here, so that many of them take their turns in the same memory.

Shapes: S prompts, T tokens of all prompts, H query heads, G KV heads, D head dim, P pages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

from lowrank_kv_vllm.step import Prompt

BLOCK = 128  # tokens of a page
MOST_BYTES = 256 << 20  # of the pages of several prompts
HEAD_SIZES = tuple(CPUAttentionBackend.get_supported_head_sizes())


class PromptPages:
    """Pages for some of the prompts of one step, which its layers use in turn; see
    :class:`lowrank_kv_vllm.step.PromptAttention`.

    Args:
        prompts: these, in the order of their tokens.
        memory_PGXD: for as many pages as they need, or more: keys and values of a page, X = 2 · BLOCK.
        num_heads: H.
    """

    @classmethod
    def of(
        cls, prompts: Sequence[Prompt], *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> "list[PromptPages]":
        """Those of a step's prompts, which take turns in one memory: of as many prompts as MOST_BYTES hold, or of one."""
        page_bytes = 2 * BLOCK * num_kv_heads * head_dim * dtype.itemsize
        groups = _grouped(prompts, MOST_BYTES // page_bytes)
        most = max(sum(map(_pages_of, group)) for group in groups)
        memory_PGXD = torch.empty(most, num_kv_heads, 2 * BLOCK, head_dim, dtype=dtype)
        return [cls(group, memory_PGXD, num_heads=num_heads) for group in groups]

    def __init__(self, prompts: Sequence[Prompt], memory_PGXD: Tensor, *, num_heads: int):
        _, num_kv_heads, _, head_dim = memory_PGXD.shape
        dtype = memory_PGXD.dtype
        self.prompts, self._memory = prompts, memory_PGXD
        new, past = [prompt.new for prompt in prompts], [prompt.past for prompt in prompts]
        lengths = torch.tensor([prompt.length for prompt in prompts])
        counts = lengths - torch.tensor(past)
        pages = torch.tensor([_pages_of(prompt) for prompt in prompts])
        firsts = pages.cumsum(0) - pages
        self._page_SP = (firsts[:, None] + torch.arange(int(pages.max()))).clamp_(max=int(pages.sum()) - 1).int()
        self._start_S = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
        self._length_S = lengths.int()
        spans = list(zip(firsts.tolist(), past, lengths.tolist(), strict=True))
        self._slot_T = torch.cat([first * BLOCK + torch.arange(before, length) for first, before, length in spans])
        self._firsts = [first * BLOCK for first, _, _ in spans]
        rests = [(first * BLOCK + length, -length % BLOCK) for first, _, length in spans]
        self._rest_T = torch.cat([torch.arange(slot, slot + count) for slot, count in rests])
        self._zero_TGD = torch.zeros(len(self._rest_T), num_kv_heads, head_dim, dtype=dtype)
        follow = all(one.stop == other.start for one, other in zip(new, new[1:], strict=False))
        self._rows: slice | Tensor = (
            slice(new[0].start, new[-1].stop) if follow else torch.cat([torch.arange(s.start, s.stop) for s in new])
        )
        self._isa = _get_attn_isa(dtype, BLOCK, head_dim)
        self._schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(new),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            seq_lens=self._length_S,
            dtype=dtype,
            query_start_loc=self._start_S,
            causal=True,
            sliding_window_size=-1,
            isa=self._isa,
            enable_kv_split=True,
        )

    def hold(self, prompt: int, first: int, key_TGD: Tensor, value_TGD: Tensor) -> None:
        slot = self._firsts[prompt] + first
        self._hold(key_TGD, value_TGD, torch.arange(slot, slot + len(key_TGD)))

    def hold_new(self, key_TGD: Tensor, value_TGD: Tensor) -> None:
        self._hold(key_TGD[self._rows], value_TGD[self._rows], self._slot_T)

    def attend(self, query_THD: Tensor, output_THD: Tensor, *, scale: float) -> None:
        # What lies behind a prompt in its last page is multiplied by zero, and others' numbers need not be finite.
        self._hold(self._zero_TGD, self._zero_TGD, self._rest_T)
        is_direct = isinstance(self._rows, slice)
        query_THD = query_THD[self._rows]
        found_THD = output_THD[self._rows] if is_direct else torch.empty_like(query_THD)
        key_PGND, value_PGND = self._memory.chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=query_THD,
            key_cache=key_PGND,
            value_cache=value_PGND,
            output=found_THD,
            query_start_loc=self._start_S,
            seq_lens=self._length_S,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self._page_SP,
            softcap=0,
            scheduler_metadata=self._schedule,
            s_aux=None,
        )
        if not is_direct:
            output_THD[self._rows] = found_THD

    def _hold(self, key_TGD: Tensor, value_TGD: Tensor, slot_T: Tensor) -> None:
        key_PGND, value_PGND = self._memory.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key_TGD, value_TGD, key_PGND, value_PGND, slot_T, self._isa)


def _pages_of(prompt: Prompt) -> int:
    """How many pages a prompt's tokens take."""
    return -(-prompt.length // BLOCK)


def _grouped(prompts: Sequence[Prompt], most_pages: int) -> list[list[Prompt]]:
    """Prompts that follow one another, as many as so many pages hold, or one."""
    groups: list[list[Prompt]] = []
    room = 0
    for prompt in prompts:
        pages = _pages_of(prompt)
        if not groups or pages > room:
            groups.append([])
            room = most_pages
        groups[-1].append(prompt)
        room -= pages
    return groups
