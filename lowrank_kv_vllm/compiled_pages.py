"""A layer's pages on a CPU, by compiled C and by vLLM's own attention.

Shapes: see :mod:`lowrank_kv_vllm.layer`; X pages of Y bytes.
"""

import torch
from torch import Tensor

from lowrank_kv.ops.layer_attention import LayerAttention
from lowrank_kv.ops.native import multiplies_pairs
from lowrank_kv.ops.native.page_decoders import PageDecoders
from lowrank_kv.ops.native.pages import NewTokens, Pages
from lowrank_kv.ops.native.projection import Projection
from lowrank_kv.ops.native.serving import ServedLayer
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv_vllm.layer import Layer
from lowrank_kv_vllm.prompts import PromptPages
from lowrank_kv_vllm.step import Prompt, Step


class CompiledPages:
    """See :class:`lowrank_kv_vllm.layer.LayerPages`.

    Args:
        page_XY: as of :class:`lowrank_kv.ops.native.pages.Pages`.

    Raises:
        UserError: there is no compiled code.
    """

    def __init__(self, page_XY: Tensor, layer: Layer):
        self._layer, self.cut = layer, torch.zeros((), dtype=torch.int64)
        key, value = layer.key, layer.value
        self._pages = Pages(
            page_XY,
            layer.layout,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            dtype=layer.dtype,
            most_tokens=layer.most_tokens,
        )
        rotated_dims = 2 * layer.rotation.cos_BTF.shape[-1]
        in_pairs = all(side.may_multiply_pairs for side in (key, value)) and multiplies_pairs(
            layer.dtype, layer.head_dim, rotated_dims
        )
        head_dim = layer.head_dim if in_pairs else None
        decoders = PageDecoders(key.decoder_RC, value.decoder_RC, head_dim=head_dim)
        self._attention = LayerAttention(decoders, layer.rotation, Scoring(layer.scale), layer.sees_itself)
        self._projection: Projection | None = None
        self._served: ServedLayer | None = None
        if key.vectors_CR is not None:
            back = layer.rotation.inverse
            turn_back = back.cos_BTF[0].contiguous(), back.sin_BTF[0].contiguous()
            self._projection = Projection(key.vectors_CR, value.vectors_CR, turn_back, num_kv_heads=layer.num_kv_heads)
            self._served = ServedLayer(self._pages, self._projection, self._attention, num_heads=layer.num_heads)

    def decode(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, step: Step, output_THD: Tensor) -> bool:
        if self._served is None or step.prompts:
            return False
        cut = self._served(query_THD, key_TGD, value_TGD, step.served, output_THD)
        if cut:
            self.cut += cut
        return cut is not None

    def project(self, new: NewTokens) -> tuple[Tensor, Tensor]:
        assert self._projection is not None, "a codec gives coefficients"
        return self._projection(new)

    def write(
        self, new: NewTokens, key_TC: Tensor, value_TC: Tensor, ranks: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.cut += self._pages.write(new, key_TC, value_TC, ranks)

    def attend(self, query_THD: Tensor, new: NewTokens, step: Step, output_THD: Tensor) -> None:
        is_direct = output_THD.dtype == torch.float32 and output_THD.is_contiguous()
        found_THD = output_THD if is_direct else torch.empty(output_THD.shape, dtype=torch.float32)
        self._pages.attend(query_THD, new, step.sequences, step.decoding_N, self._attention, found_THD)
        if is_direct:
            return
        if step.decoding_rows is None:
            output_THD.copy_(found_THD)
        else:
            output_THD[step.decoding_rows] = found_THD[step.decoding_rows].to(output_THD.dtype)

    def rows(self, page_P: Tensor, count: int) -> tuple[Tensor, Tensor]:
        key_NR, value_NR = self._pages.rows(page_P, count)
        return key_NR.to(self._layer.dtype), value_NR.to(self._layer.dtype)

    def sinks(self, page_P: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return self._pages.sinks(int(page_P[0]), count)

    def prompts(self, prompts: list[Prompt]) -> list[PromptPages]:
        return PromptPages.of(
            prompts,
            num_heads=self._layer.num_heads,
            num_kv_heads=self._layer.num_kv_heads,
            head_dim=self._layer.head_dim,
            dtype=self._layer.dtype,
        )
