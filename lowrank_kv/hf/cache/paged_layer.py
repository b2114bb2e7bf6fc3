"""A cache layer on a GPU: coefficients in pages, filled and read by Triton kernels, all sequences at once.

Shapes: B batch, H query heads, G KV heads, D head dim, C = G·D, Q new tokens, T cached tokens.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_kv.codec import Codec, Encoded, LayerCodec
from lowrank_kv.hf.backends import Backend
from lowrank_kv.hf.cache.codec_layer import CodecLayer
from lowrank_kv.hf.cache.layer import CallContext, join_heads
from lowrank_kv.hf.rope import unrotated
from lowrank_kv.ops.gated_append.triton import gated_append
from lowrank_kv.ops.gated_append.weights import append_weights
from lowrank_kv.ops.gradients import without_gradients
from lowrank_kv.ops.paged_attention.triton import paged_attention
from lowrank_kv.ops.triton.availability import launching_on
from lowrank_kv.ops.triton.launch import rows_together
from lowrank_kv.stores.paged import PagedStore
from lowrank_kv.stores.shared_page_pool import SharedPagePool
from lowrank_kv.utils.dispatch_log import log_choice
from lowrank_kv.utils.errors import UserError

# Rows of queries that share a KV head: the kernel that rebuilds keys scores a tile's tokens with all of them at
# once.
MAX_QUERY_ROWS = 128


class PagedLayer(CodecLayer):
    """Keys and values of one layer, in stores that share a pool of pages with the other layers' stores.

    A decoded token takes five kernel launches: keys and values are each projected, gated and packed in one, by the
    compressor's weights as they were at the first token, and attention takes three. The host seldom waits. Prompts and
    chunks are handled as in :class:`lowrank_kv.hf.cache.ragged_layer.RaggedLayer`.
    """

    def __init__(self, codec: LayerCodec, shared_page_pool: SharedPagePool, *, is_first: bool):
        """
        Args:
            codec: of this layer.
            shared_page_pool: of all layers of the cache.
            is_first: whether this is the first compressed layer, which reserves a step's pages for all of them.
        """
        super().__init__(codec)
        self.shared_page_pool, self.is_first = shared_page_pool, is_first
        self.key: PagedStore | None = None  # from the first token on
        self.value: PagedStore | None = None
        self.length = 0

    @torch.no_grad()
    def start(self) -> None:
        super().start()
        if self.is_first:  # of stores that an earlier start, which failed, may have made for other sequences
            self.shared_page_pool.release()
        self.key, self.value = (
            self.shared_page_pool.new_store(self.batch_size, self.dtype, self.device) for _ in range(2)
        )
        self.appends = [self._append_of(codec) for codec in (self.codec.key, self.codec.value)]
        log_choice("paged_attention", "triton", self.dtype, self.device)
        if None in self.appends:
            # Before any layer decodes: all of them start in a text's first call.
            self.shared_page_pool.appends_without_kernels = True
            because = f"a codec has no gate whose weights a kernel could take in {self.dtype}"
            log_choice("gated_append", "eager", self.dtype, self.device, because)
        else:
            log_choice("gated_append", "triton", self.dtype, self.device)

    def _append_of(self, codec: Codec) -> dict[str, Any] | None:
        """Arguments of the kernel that appends one token of each sequence; None if the codec has no gate for it,
        or one whose weights leave the range of the dtype."""
        gate = codec.token_gate(torch.float32)
        if gate is None:
            return None
        weight_CX = append_weights(gate.basis_CC, gate.weight_CC, gate.scale_C, gate.coef_scale_C, self.dtype)
        if not bool(weight_CX.isfinite().all()):
            return None
        return {
            "weight_CX": weight_CX.to(self.device).contiguous(),
            "bias_C": gate.bias_C.detach().to(self.device),
            "threshold": gate.threshold,
            "granularity": gate.granularity,
        }

    # -- new tokens -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def append(self, key_BGQD: Tensor, value_BGQD: Tensor, context: CallContext) -> None:
        length = self.length + key_BGQD.shape[2]
        max_length = self.shared_page_pool.max_length
        if length > max_length:
            raise UserError(
                f"`max_length` of the cache is {max_length}, and the text has come to {length} tokens; make the cache with "
                f"a larger one"
            )
        if not self.length or key_BGQD.shape[2] > 1 or self.shared_page_pool.appends_without_kernels:
            super().append(key_BGQD, value_BGQD, context)
            return
        if self.is_first:
            self.shared_page_pool.reserve_step(self.batch_size)
        sides = zip((self.key, self.value), (unrotated(key_BGQD, context.rope), value_BGQD), self.appends, strict=True)
        with launching_on(self.device):
            for store, states, arguments in sides:
                gated_append(join_heads(states)[:, 0], store=store, **arguments)
        self.length += 1

    def store(self, key: Encoded, value: Encoded) -> None:
        self.key.append(*key)
        self.value.append(*value)
        self.length += key[0].shape[1]

    # -- attention ------------------------------------------------------------------------------------------------

    def attend_cached(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """A prompt, and long chunks after it, run `inner` on rebuilt keys and values (a prompt on exact ones if configured
        so); the kernels serve a few queries at a time."""
        if not self.is_decoding(query):
            is_exact = self.attends_exactly
            output = inner(module, query, *self._rebuild(), mask, **kwargs)[0]
            return output if is_exact else without_gradients(output, query), None
        with launching_on(self.device):
            output_BHQD = paged_attention(
                query,
                self.key,
                self.value,
                self._decoders,
                inner.scoring(kwargs),
                rotation=None if self.history is None else self.history.table(),
                mask_BQT=None if mask is None else rows_together(mask[:, 0]),
            )
        return without_gradients(output_BHQD.transpose(1, 2).contiguous(), query), None

    def is_decoding(self, query: Tensor) -> bool:
        groups = self.codec.key.width // self.head_dim
        return super().is_decoding(query) and query.shape[1] * query.shape[2] <= MAX_QUERY_ROWS * groups

    def dense(self) -> tuple[Tensor, Tensor]:
        return self.key.dense(), self.value.dense()

    # -- what generate() does to a cache --------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        return self.length

    def truncate(self, length: int) -> None:
        if not length:
            # As an empty cache: the next call may have other sequences, for which old pages are of the wrong number.
            self.reset()
            return
        super().truncate(length)
        self.key.crop(length)
        self.value.crop(length)
        self.length = length

    def select(self, rows: list[int]) -> None:
        if rows != list(range(self.batch_size)):
            index_B = torch.tensor(rows, device=self.device)
            if self.is_first:
                self.shared_page_pool.check_select(index_B)
            self.key.select(index_B)
            self.value.select(index_B)

    def clear(self) -> None:
        super().clear()
        # The next batch may have another size; nothing may keep the pages of this one. Where only a later layer is cleared,
        # because it failed in a text's first call, those before it still read theirs.
        if self.is_first:
            self.shared_page_pool.release()
        self.key = self.value = None
        self.length = 0

    def copy_state(self, memo: dict) -> None:
        self.key, self.value = copy.deepcopy((self.key, self.value), memo)

    def __deepcopy__(self, memo: dict) -> "PagedLayer":
        twin = super().__deepcopy__(memo)
        # Also of an empty layer, whose state is not copied: otherwise both would share the pool that the first one makes.
        twin.shared_page_pool = copy.deepcopy(self.shared_page_pool, memo)
        return twin

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """The layer's own tables; pages belong to the cache."""
        if self.is_initialized:
            yield from self.key.tensors_by_kind()
            yield from self.value.tensors_by_kind()
