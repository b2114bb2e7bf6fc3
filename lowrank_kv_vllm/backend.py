"""Attention over pages of packed coefficients, as a backend of vLLM.

A prompt that is read at once is attended exactly, as `generate()` does with `prefill: exact`. What an earlier step read, the
chunk of a long prompt or a prefix that another request left, is read from its pages: rebuilt for many new tokens, in the
compressed form for a few. New tokens see each other exactly, and are written when they have been attended.

Shapes: T new tokens of all sequences, H query heads, G KV heads, D head dim, C = G·D, Q new tokens of one sequence, R
coefficients.
"""

import logging
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionLayer, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from lowrank_kv.hf.cache.windowed.plan import InitialBasis
from lowrank_kv.ops.native.pages import NewTokens, PageDecoders, Pages
from lowrank_kv.stores.arena import PageLayout
from lowrank_kv.utils.errors import UserError
from lowrank_kv_vllm.plans import plan_of
from lowrank_kv_vllm.rotation import RotaryPairs
from lowrank_kv_vllm.settings import ServingConfig
from lowrank_kv_vllm.step import Prompt, Step, StepBuilder

logger = logging.getLogger("lowrank_kv")


class PagedBackend(AttentionBackend):
    """See the module."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float32"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["PagedAttention"]:
        return PagedAttention

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]  # so that a page is never split

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # a page's bytes lie side by side


class PagedAttention(AttentionImpl[Step]):
    """One layer's attention; :meth:`bind` tells it which layer it is of."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ):
        refused = {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            "capped scores": logits_soft_cap,
            "a layer that reads another's cache": kv_sharing_target_layer_name,
            "learned sinks": sinks,
        }
        for what, given in refused.items():
            if given is not None:
                raise UserError(f"compressed pages are not served for {what}, which this model has; use another model")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self._pages: Pages | None = None
        self.num_cut = self.num_rows = 0

    def bind(self, layer_name: str, settings: ServingConfig, config: VllmConfig) -> None:
        """Take the layer's bases, and work out its pages."""
        plan, cache_config = plan_of(settings), config.cache_config
        self._key, self._value = plan.layers[extract_layer_index(layer_name)]
        self._settings, self._dtype = settings, config.model_config.dtype
        self._most_tokens = config.model_config.max_model_len + cache_config.block_size
        self._decoders: PageDecoders | None = None
        self._decoder_matrices = tuple(_decoder(side, self._dtype) for side in (self._key, self._value))

    def layout(self, block_size: int) -> PageLayout:
        """A page of so many tokens."""
        return PageLayout.of(
            self._key.quantization,
            self._value.quantization,
            block_size=block_size,
            num_sinks=self._settings.num_sink_tokens,
            sink_bytes=self.num_kv_heads * self.head_size * self._dtype.itemsize,
            margin=self._settings.page_margin,
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend, then write the new tokens. Queries (T, H, D), keys and values (T, G, D) and output (T, H, D) as the model
        has them, keys and queries rotated; `kv_cache` as :meth:`layout` says, (pages, 1, block size, bytes of a token)."""
        if attn_metadata is None:  # a model that is only warmed up
            return output
        step, tokens = attn_metadata, attn_metadata.num_tokens
        if self._pages is None:
            self._open(kv_cache)
        new = NewTokens(key[:tokens], value[:tokens], step.position_T, step.slot_T)
        if len(step.decoding_N):
            self._decode(query[:tokens], new, step, output[:tokens])
        for prompt in step.prompts:
            output[prompt.new] = self._read_prompt(query[prompt.new], new, prompt, step)
        self._write(new, step)
        return output

    def _open(self, kv_cache: Tensor) -> None:
        """Look at the pages that the engine has made."""
        self._rotary = RotaryPairs.of_model()
        self._decoders = PageDecoders(*self._decoder_matrices, self._dtype)
        count, _, block_size, token_bytes = kv_cache.shape
        self._pages = Pages(
            kv_cache.as_strided((count, block_size * token_bytes), (kv_cache.stride(0), 1)),
            self.layout(block_size),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            dtype=self._dtype,
            most_tokens=self._most_tokens,
        )

    def _decode(self, query_THD: Tensor, new: NewTokens, step: Step, output_THD: Tensor) -> None:
        is_direct = output_THD.dtype == torch.float32 and output_THD.is_contiguous()
        found_THD = output_THD if is_direct else torch.empty(output_THD.shape, dtype=torch.float32)
        self._pages.attend(
            query_THD,
            new,
            step.sequences,
            step.decoding_N,
            self._decoders,
            self._rotary.packed,
            scaling=self.scale,
            softcap=None,
            output_THD=found_THD,
        )
        if is_direct:
            return
        if step.decoding_rows is None:
            output_THD.copy_(found_THD)
        else:
            output_THD[step.decoding_rows] = found_THD[step.decoding_rows].to(output_THD.dtype)

    def _read_prompt(self, query_QHD: Tensor, new: NewTokens, prompt: Prompt, step: Step) -> Tensor:
        """Attention of many new tokens over rebuilt states of those before them, (Q, H, D)."""
        key_TGD, value_TGD = new.key_TGD[prompt.new], new.value_TGD[prompt.new]
        mask_QT = None
        if prompt.past:
            past = self._rebuilt(step.sequences.page_BP[prompt.sequence], prompt.past)
            key_TGD, value_TGD = (torch.cat(pair) for pair in zip(past, (key_TGD, value_TGD), strict=True))
            mask_QT = torch.ones(len(query_QHD), len(key_TGD), dtype=torch.bool).tril(prompt.past)
        query, key, value = (states.transpose(0, 1)[None] for states in (query_QHD, key_TGD, value_TGD))
        found = F.scaled_dot_product_attention(
            query, key, value, mask_QT, is_causal=mask_QT is None, scale=self.scale, enable_gqa=True
        )
        return found[0].transpose(0, 1)

    def _rebuilt(self, page_P: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of a sequence's first tokens, (T, G, D) each in the model's dtype."""
        sinks = min(past, self._settings.num_sink_tokens)
        exact = self._pages.sinks(int(page_P[0]), sinks)
        rows = self._pages.rows(page_P, past - sinks)
        key_TGD, value_TGD = (
            (row_TR.to(self._dtype) @ decoder_RC).unflatten(1, (self.num_kv_heads, self.head_size))
            for row_TR, decoder_RC in zip(rows, self._decoder_matrices, strict=True)
        )
        key_TGD = self._rotary.rotate(key_TGD, slice(sinks, past)).to(self._dtype)
        return torch.cat([exact[0], key_TGD]), torch.cat([exact[1], value_TGD])

    def _write(self, new: NewTokens, step: Step) -> None:
        if step.turn is None:
            step.turn = self._rotary.turn_back(step.position_T)
        unrotated_TGD = self._rotary.unrotate(new.key_TGD, step.turn)
        key_TC = unrotated_TGD.flatten(1) @ self._key.vectors_PWR[0]
        value_TC = new.value_TGD.float().flatten(1) @ self._value.vectors_PWR[0]
        self.num_cut += self._pages.write(new, key_TC, value_TC)
        self.num_rows += 2 * step.num_tokens


def _decoder(side: InitialBasis, dtype: torch.dtype) -> Tensor:
    """The map from coefficients to states, (R, C)."""
    return side.decoder(dtype)[0].mT.contiguous()
