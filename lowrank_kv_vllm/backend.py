"""Attention over pages of packed coefficients, as a backend of vLLM.

A prompt that is read at once is attended exactly, as `generate()` does with `prefill: exact`. What an earlier step read, the
chunk of a long prompt or a prefix that another request left, is read from its pages: rebuilt for many new tokens, in the
compressed form for one. The new tokens of a prompt see each other exactly, and so depend on how it was divided, which a
preemption may change; generated ones see all others in the compressed form, also where several are read at once, as guesses
or after a preemption.

Shapes: T new tokens of all sequences, H query heads, G KV heads, D head dim, C = G·D, Q new tokens of one sequence, R
coefficients.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionLayer, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from lowrank_kv.ops.native.pages import NewTokens
from lowrank_kv.ops.triton.availability import SWITCH, has_kernels
from lowrank_kv.stores.arena import PageLayout
from lowrank_kv.utils.errors import UserError
from lowrank_kv_vllm import statistics
from lowrank_kv_vllm.layer import Layer, LayerPages
from lowrank_kv_vllm.plans import served
from lowrank_kv_vllm.rotation import rotated, rotation_of_model
from lowrank_kv_vllm.settings import ServingConfig
from lowrank_kv_vllm.step import Step, StepBuilder

TILE = 2048  # tokens that are rebuilt at a time: their keys, and what turns them, are several times what pages take


class PagedBackend(AttentionBackend):
    """See the module."""

    forward_includes_kv_cache_update = True
    # What `refusals` goes by: vLLM asks backends that it chooses, not one that it is given.
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16]

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
        self._pages: LayerPages | None = None

    def bind(self, layer_name: str, settings: ServingConfig, config: VllmConfig) -> None:
        """Take what compresses the layer, and work out its pages."""
        self._index, self._dtype = extract_layer_index(layer_name), config.model_config.dtype
        # The worker has made its GPU the current one.
        self._served = served(settings, self._dtype, torch.device(config.device_config.device_type))
        self._key, self._value = self._served.layers[self._index]
        self._max_model_len = config.model_config.max_model_len
        self._most_tokens = self._max_model_len + config.cache_config.block_size

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Read the rotation of the model, whose layers are made by now: one that is not served ends the server's start."""
        self._rotation = rotation_of_model(self._max_model_len)

    def layout(self, block_size: int) -> PageLayout:
        """A page of so many tokens."""
        sink_bytes = self.num_kv_heads * self.head_size * self._dtype.itemsize
        return self._served.layout(self._index, block_size=block_size, sink_bytes=sink_bytes)

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
        """Write the new tokens, and attend. Queries (T, H, D), keys and values (T, G, D) and output (T, H, D) as the model
        has them, keys and queries rotated; `kv_cache` as :meth:`layout` says, (pages, 1, block size, bytes of a token)."""
        if attn_metadata is None:  # a model that is only warmed up
            return output
        step, tokens = attn_metadata, attn_metadata.num_tokens
        if self._pages is None:
            self._open(kv_cache)
        found = output
        if len(query) > tokens:
            query, key, value, found = (states[:tokens] for states in (query, key, value, output))
        self._statistics.add_written(2 * tokens)
        if self._pages.decode(query, key, value, step, found):
            return output
        new = NewTokens(key, value, step.position_T, step.slot_T)
        self._write(new, step)
        if len(step.decoding_N):
            self._pages.attend(query, new, step, found)
        if step.prompts:
            self._read_prompts(query, new, step, found)
        return output

    def _open(self, kv_cache: Tensor) -> None:
        """Look at the pages that the engine has made."""
        count, _, block_size, token_bytes = kv_cache.shape
        layer = Layer(
            layout=self.layout(block_size),
            key=self._key,
            value=self._value,
            rotation=self._rotation,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            dtype=self._dtype,
            scale=self.scale,
            most_tokens=self._most_tokens,
            sees_itself=self._served.sees_itself,
        )
        self._pages = pages_of(kv_cache.as_strided((count, block_size * token_bytes), (kv_cache.stride(0), 1)), layer)
        self._statistics = statistics.of_process()
        uncompressed = 2 * self.num_kv_heads * self.head_size * self._dtype.itemsize
        self._statistics.add_layer(token_bytes, uncompressed, self._pages.cut)

    def _read_prompts(self, query_THD: Tensor, new: NewTokens, step: Step, output_THD: Tensor) -> None:
        """Attention of many new tokens over rebuilt states of those before them."""
        if step.prompt_groups is None:
            step.prompt_groups = self._pages.prompts(step.prompts)
        exactly = self._served.reads_prompts_exactly
        for group in step.prompt_groups:
            for i, prompt in enumerate(group.prompts):
                rebuilt = prompt.past if exactly else prompt.length
                for first, key_TGD, value_TGD in self._rebuilt(step.sequences.page_BP[prompt.sequence], rebuilt):
                    group.hold(i, first, key_TGD, value_TGD)
            if exactly:
                group.hold_new(new.key_TGD, new.value_TGD)
            group.attend(query_THD, output_THD, scale=self.scale)

    def _rebuilt(self, page_P: Tensor, past: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """A sequence's first tokens in tiles: the first one's position, and rotated keys and values, (T, G, D) each in the
        model's dtype."""
        sinks = min(past, self._served.num_sinks)
        if sinks:
            yield 0, *self._pages.sinks(page_P, sinks)
        if past == sinks:
            return
        key_NR, value_NR = self._pages.rows(page_P, past - sinks)
        for tile in tiles(past - sinks, TILE):
            key_TGD, value_TGD = (
                (row_NR[tile] @ side.decoder_RC).unflatten(1, (self.num_kv_heads, self.head_size))
                for row_NR, side in ((key_NR, self._key), (value_NR, self._value))
            )
            first = sinks + tile.start
            position_T = torch.arange(first, sinks + tile.stop, device=page_P.device)
            yield first, rotated(self._rotation, key_TGD, position_T).to(self._dtype), value_TGD

    def _write(self, new: NewTokens, step: Step) -> None:
        if self._key.encode is None:
            (key_TC, value_TC), ranks = self._pages.project(new), None
        else:
            unrotated_TGD = rotated(self._rotation.inverse, new.key_TGD, step.position_T)
            key_TC, key_rank_T = self._key.encode(unrotated_TGD.flatten(1))
            value_TC, value_rank_T = self._value.encode(new.value_TGD.float().flatten(1))
            ranks = key_rank_T, value_rank_T
        self._pages.write(new, key_TC, value_TC, ranks)


def tiles(count: int, size: int) -> list[slice]:
    """Tiles of so many tokens, the last of which has what is left, too: products of few rows may add in another order."""
    starts = range(0, max(count - size, 0) + 1, size)
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], count], strict=True)]


def pages_of(page_XY: Tensor, layer: Layer) -> LayerPages:
    """A layer's pages: by Triton's kernels where these run, else by compiled C.

    Raises:
        UserError: the pages' device has neither, or they do not lie as the code needs it.
    """
    if has_kernels(page_XY.device):
        from lowrank_kv_vllm.kernel_pages import KernelPages  # Triton is not everywhere

        return KernelPages(page_XY, layer)
    if page_XY.device.type != "cpu":
        raise UserError(
            f"pages on {page_XY.device} have no Triton kernels; use an NVIDIA GPU since Ampere, install `triton`, and unset "
            f"${SWITCH} if it is 0"
        )
    from lowrank_kv_vllm.compiled_pages import CompiledPages  # vLLM's attention on CPUs is not in its builds for GPUs

    return CompiledPages(page_XY, layer)
