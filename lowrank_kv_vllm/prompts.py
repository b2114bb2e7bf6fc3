"""Attention of many new tokens, by the kernel that stock vLLM uses, over pages that last for one layer.

A prompt's new tokens see each other exactly. So a layer writes them into pages of uncompressed states, behind what was
rebuilt of tokens that earlier steps read, and forgets them when they have been attended.

Shapes: S prompts, T tokens of all prompts, H query heads, G KV heads, D head dim, P pages.
"""

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

BLOCK = 128  # tokens of a page
HEAD_SIZES = tuple(CPUAttentionBackend.get_supported_head_sizes())


class PromptPages:
    """Pages for the prompts of one step, which its layers use in turn.

    Args:
        new: of each prompt, its new tokens among all of the step.
        past: of each, the tokens before them.
        num_heads, num_kv_heads, head_dim, dtype: of the model.
    """

    def __init__(
        self, new: list[slice], past: list[int], *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ):
        counts = torch.tensor([span.stop - span.start for span in new])
        lengths = counts + torch.tensor(past)
        pages = -(-lengths // BLOCK)
        firsts = pages.cumsum(0) - pages
        self._page_SP = (firsts[:, None] + torch.arange(int(pages.max()))).clamp_(max=int(pages.sum()) - 1).int()
        self._start_S = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
        self._length_S = lengths.int()
        spans = list(zip(firsts.tolist(), past, lengths.tolist(), strict=True))
        self._slot_T = torch.cat([first * BLOCK + torch.arange(before, length) for first, before, length in spans])
        self._firsts = [first * BLOCK for first, _, _ in spans]
        follow = all(one.stop == other.start for one, other in zip(new, new[1:], strict=False))
        self._rows: slice | Tensor = (
            slice(new[0].start, new[-1].stop) if follow else torch.cat([torch.arange(s.start, s.stop) for s in new])
        )
        # Zeros, because what was never written is multiplied by zero.
        self._memory = torch.zeros(int(pages.sum()), num_kv_heads, 2 * BLOCK, head_dim, dtype=dtype)
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
        """Put the rotated keys, and values, of a prompt's tokens from position `first` on in place."""
        slot = self._firsts[prompt] + first
        self._hold(key_TGD, value_TGD, torch.arange(slot, slot + len(key_TGD)))

    def hold_new(self, key_TGD: Tensor, value_TGD: Tensor) -> None:
        """The same of all prompts' new tokens, from those of the step."""
        self._hold(key_TGD[self._rows], value_TGD[self._rows], self._slot_T)

    def attend(self, query_THD: Tensor, output_THD: Tensor, *, scale: float) -> None:
        """Attend, each token to its prompt up to itself.

        Args:
            query_THD: rotated, of the step's tokens, prompts or not.
            output_THD: of the same tokens; those of no prompt stay as they are.
            scale: of scores.
        """
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
