"""A cache layer whose tokens keep different numbers of coefficients (DynaKV, section 3.2).

Shapes: B batch, H query heads, G KV heads, D head dim, C = G·D, Q new tokens, T cached tokens.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowrank.codec import Codec, LayerCodec, prefix_mask
from lowrank.hf.backends import Backend
from lowrank.hf.layer import MAX_DECODE_QUERIES, CompressedLayer, join_heads, split_heads
from lowrank.hf.rope import Rope
from lowrank.ops.ragged_attention import ragged_attention
from lowrank.ragged import RaggedStore


@dataclasses.dataclass
class RaggedSequence:
    """One sequence's coefficients."""

    key: RaggedStore
    value: RaggedStore

    @property
    def length(self) -> int:
        return self.key.length

    def crop(self, length: int) -> None:
        self.key.crop(length)
        self.value.crop(length)

    def clone(self) -> "RaggedSequence":
        return RaggedSequence(self.key.clone(), self.value.clone())

    def tensors(self) -> Iterator[Tensor]:
        yield from self.key.tensors()
        yield from self.value.tensors()


class RaggedLayer(CompressedLayer):
    """Keys (before rotation) and values as their codec gives them, each token at its own rank."""

    rotates = True

    def __init__(self, codec: LayerCodec):
        super().__init__()
        self.codec = codec
        self._prompt: tuple[Tensor, Tensor] | None = None  # masked coefficients of a prompt, until it is attended

    def new_sequence(self) -> RaggedSequence:
        return RaggedSequence(
            *(RaggedStore(c.width, dtype=self.dtype, device=self.device) for c in (self.codec.key, self.codec.value))
        )

    def take(self, key_BGQD: Tensor, value_BGQD: Tensor, rope: Rope | None) -> None:
        keep = not self.get_seq_length()
        if rope is not None:
            key_BGQD = rope.unrotate(key_BGQD)
        stores = [[getattr(sequence, side) for sequence in self.sequences] for side in ("key", "value")]
        key_coef = self._store(self.codec.key, stores[0], key_BGQD, keep=keep)
        value_coef = self._store(self.codec.value, stores[1], value_BGQD, keep=keep)
        self._prompt = (key_coef, value_coef) if keep else None

    def _store(self, codec: Codec, stores: list[RaggedStore], states_BGTD: Tensor, *, keep: bool) -> Tensor | None:
        coef_BTC, rank_BT = codec.encode(join_heads(states_BGTD))
        coef_BTC = coef_BTC.to(self.dtype)
        for store, coef_TC, rank_T in zip(stores, coef_BTC, rank_BT, strict=True):
            # A prompt leaves room to grow to the tokens that follow.
            store.append(coef_TC, rank_T, exact=rank_T.shape[0] > MAX_DECODE_QUERIES)
        return coef_BTC * prefix_mask(rank_BT, codec.width) if keep else None

    def attend_cached(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """A prompt, and long chunks after it, rebuild this layer's keys and values and run `inner` (sdpa) on them; a few
        queries at a time attend in the compressed form."""
        if self._prompt is None and query.shape[2] <= MAX_DECODE_QUERIES:
            return self._attend_compressed(query, mask, kwargs["scaling"], inner.softcap(kwargs))
        key, value = self._rebuild()
        return inner(module, query, key, value, mask, **kwargs)

    def _attend_compressed(
        self, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
    ) -> tuple[Tensor, None]:
        key_decoder, value_decoder = self._decoders()
        output_BHQD = torch.stack(
            [
                ragged_attention(
                    query[b],
                    sequence.key,
                    sequence.value,
                    key_decoder,
                    value_decoder,
                    scaling=scaling,
                    rotation=None if self.history is None else self.history.rotation(b, self.device),
                    softcap=softcap,
                    mask_QT=None if mask is None else mask[b if mask.shape[0] > 1 else 0, 0],
                )
                for b, sequence in enumerate(self.sequences)
            ]
        )
        return output_BHQD.transpose(1, 2).contiguous(), None

    def _rebuild(self) -> tuple[Tensor, Tensor]:
        if self._prompt is not None:
            (key_coef, value_coef), self._prompt = self._prompt, None
        else:
            key_coef = torch.stack([sequence.key.dense() for sequence in self.sequences])
            value_coef = torch.stack([sequence.value.dense() for sequence in self.sequences])
        key_decoder, value_decoder = self._decoders()
        key = split_heads(key_coef @ key_decoder, self.head_dim)
        if self.history is not None:
            key = self.history.rope().rotate(key)
        return key, split_heads(value_coef @ value_decoder, self.head_dim)

    def _decoders(self) -> tuple[Tensor, Tensor]:
        return (
            self.codec.key.decoder(self.dtype, self.device),
            self.codec.value.decoder(self.dtype, self.device),
        )

    def reset(self) -> None:
        super().reset()
        self._prompt = None
