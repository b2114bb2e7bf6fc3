"""A layer's pages where Triton's kernels run, on an NVIDIA GPU or in Triton's interpreter. Nothing here waits for a GPU.

Shapes: see :mod:`lowrank_kv_vllm.layer`; X pages of Y bytes, K tokens that a prompt sees.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lowrank_kv.ops.arena_append.triton import PageWriter
from lowrank_kv.ops.arena_attention.page_reader import PageReader
from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.layer_attention import LayerAttention
from lowrank_kv.ops.native.pages import NewTokens
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv_vllm.layer import Layer
from lowrank_kv_vllm.rotation import rotated
from lowrank_kv_vllm.step import Prompt, Step


class KernelPages:
    """See :class:`lowrank_kv_vllm.layer.LayerPages`.

    Args:
        page_XY: as of :class:`lowrank_kv.ops.arena_attention.operands.ArenaPages`.

    Raises:
        UserError: pages do not lie as kernels need it.
    """

    def __init__(self, page_XY: Tensor, layer: Layer):
        self._layer = layer
        shape = {"num_kv_heads": layer.num_kv_heads, "head_dim": layer.head_dim}
        self._reader = PageReader(page_XY, layer.layout, **shape, dtype=layer.dtype)
        self._writer = PageWriter(page_XY, layer.layout)
        decoders = Decoders(layer.key.decoder_RC, layer.value.decoder_RC)
        self._attention = LayerAttention(decoders, layer.rotation, Scoring(layer.scale), layer.sees_itself)

    @property
    def cut(self) -> Tensor:
        return self._writer.cut

    def project(self, new: NewTokens) -> tuple[Tensor, Tensor]:
        unrotated_TGD = rotated(self._layer.rotation.inverse, new.key_TGD, new.position_T)
        key_TC, value_TC = unrotated_TGD.flatten(1), new.value_TGD.float().flatten(1)
        return key_TC @ self._layer.key.vectors_CR, value_TC @ self._layer.value.vectors_CR

    def write(
        self, new: NewTokens, key_TC: Tensor, value_TC: Tensor, ranks: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self._writer.write(new, key_TC, value_TC, ranks)

    def decode(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, step: Step, output_THD: Tensor) -> bool:
        return False  # each of its parts is a kernel

    def attend(self, query_THD: Tensor, new: NewTokens, step: Step, output_THD: Tensor) -> None:
        self._reader.attend(query_THD, new, step.sequences, step.decoding_N, self._attention, output_THD)

    def rows(self, page_P: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return self._reader.rows(page_P, count, self._layer.dtype)

    def sinks(self, page_P: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return self._reader.sinks(page_P[0], count)

    def prompts(self, prompts: list[Prompt]) -> "list[PromptStates]":
        return [PromptStates(prompt) for prompt in prompts]


class PromptStates:
    """Attention over one prompt's states by torch's own; see :class:`lowrank_kv_vllm.step.PromptAttention`."""

    def __init__(self, prompt: Prompt):
        self.prompts = [prompt]
        self._held: list[tuple[Tensor, Tensor]] = []

    def hold(self, prompt: int, first: int, key_TGD: Tensor, value_TGD: Tensor) -> None:
        self._held.append((key_TGD, value_TGD))

    def hold_new(self, key_TGD: Tensor, value_TGD: Tensor) -> None:
        [prompt] = self.prompts
        self._held.append((key_TGD[prompt.new], value_TGD[prompt.new]))

    def attend(self, query_THD: Tensor, output_THD: Tensor, *, scale: float) -> None:
        [prompt] = self.prompts
        key_KGD, value_KGD = (torch.cat(states) for states in zip(*self._held, strict=True))
        self._held.clear()
        query_THD = query_THD[prompt.new]
        tokens, seen = len(query_THD), len(key_KGD)
        mask_TK = None
        if seen > tokens:  # torch aligns its own causal mask with the first token
            mask_TK = torch.ones(tokens, seen, dtype=torch.bool, device=key_KGD.device).tril_(seen - tokens)
        found_HTD = F.scaled_dot_product_attention(
            query_THD.transpose(0, 1)[None],
            key_KGD.transpose(0, 1)[None],
            value_KGD.transpose(0, 1)[None],
            attn_mask=mask_TK,
            is_causal=mask_TK is None,
            scale=scale,
            enable_gqa=True,
        )[0]
        output_THD[prompt.new] = found_HTD.transpose(0, 1)
