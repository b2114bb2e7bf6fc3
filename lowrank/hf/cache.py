"""A compressed cache that stock `generate()` drives.

Shapes: B batch, H query heads, G KV heads, D head dim, C = G·D, Q new tokens, T cached tokens.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from lowrank.codec import LayerCodec, prefix_mask
from lowrank.errors import UserError
from lowrank.hf.attention import prepare
from lowrank.hf.geometry import KVGeometry, attention_modules, geometry_of, rotary_function, rotary_module
from lowrank.hf.rope import Rope, RopeHistory
from lowrank.ops.ragged_attention import ragged_attention
from lowrank.ragged import RaggedStore

# Up to this many new tokens (a drafted continuation) are attended without rebuilding the cache.
MAX_DECODE_QUERIES = 16


def join_heads(states_BGTD: Tensor) -> Tensor:
    """(B, G, T, D) → (B, T, C)."""
    return states_BGTD.transpose(1, 2).flatten(2)


def split_heads(states_BTC: Tensor, head_dim: int) -> Tensor:
    """(B, T, C) → (B, G, T, D)."""
    return states_BTC.unflatten(2, (-1, head_dim)).transpose(1, 2)


class LowRankLayer(CacheLayerMixin):
    """One layer's compressed keys and values, a :class:`RaggedStore` each per sequence."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, codec: LayerCodec, history: RopeHistory | None, *, is_last: bool):
        super().__init__()
        self.codec, self.history, self.is_last = codec, history, is_last
        self.key_stores: list[RaggedStore] = []
        self.value_stores: list[RaggedStore] = []
        self._rope: Rope | None = None
        self._armed = False
        self._prompt: tuple[Tensor, Tensor] | None = None  # masked coefficients of a prompt, until it is attended

    # -- filling --------------------------------------------------------------------------------------------------

    def arm(self, rope: Rope | None) -> None:
        self._rope, self._armed = rope, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.head_dim = key_states.shape[0], key_states.shape[3]

        def stores(codec) -> list[RaggedStore]:
            return [
                RaggedStore(codec.width, dtype=self.dtype, device=self.device, constant_rank=codec.constant_rank)
                for _ in range(self.batch_size)
            ]

        self.key_stores, self.value_stores = stores(self.codec.key), stores(self.codec.value)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Compress and store rotated keys (B, G, Q, D) and values; what is returned is only the new tokens.

        The attention function reads the stores, not the returned tensors, so a model that does not run it is refused.
        """
        if not self._armed:
            raise UserError(
                "a compressed cache was given to a model that is not prepared for it; make the cache with "
                "`from_model(model)` or attach the compressor to this very model first"
            )
        rope, self._rope, self._armed = self._rope, None, False
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch_size:
            raise UserError(
                f"the cache holds {self.batch_size} sequences, but {key_states.shape[0]} were passed; start a fresh cache"
            )
        past = self.get_seq_length()
        if self.codec.rope == "pre" and rope is not None:
            self.history.extend(rope, past + key_states.shape[2])
            key_states_unrotated = rope.unrotate(key_states)
        else:
            key_states_unrotated = key_states
        prompt = [
            self._store(self.codec.key, self.key_stores, key_states_unrotated, keep=not past),
            self._store(self.codec.value, self.value_stores, value_states, keep=not past),
        ]
        self._prompt = None if past else tuple(prompt)
        return key_states, value_states

    def _store(self, codec, stores: list[RaggedStore], states_BGTD: Tensor, *, keep: bool) -> Tensor | None:
        coef_BTC, rank_BT = codec.encode(join_heads(states_BGTD))
        coef_BTC = coef_BTC.to(self.dtype)
        for store, coef_TC, rank_T in zip(stores, coef_BTC, rank_BT, strict=True):
            # A prompt leaves room to grow to the tokens that follow.
            store.append(coef_TC, rank_T, exact=rank_T.shape[0] > MAX_DECODE_QUERIES)
        return coef_BTC * prefix_mask(rank_BT, codec.width) if keep else None

    # -- attending ------------------------------------------------------------------------------------------------

    def attend(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Callable, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attention of (B, H, Q, D) queries over all cached tokens → ((B, Q, H, D), None).

        A prompt, and long chunks after it, rebuild this layer's keys and values and run `inner` (sdpa) on them; a few
        queries at a time attend in the compressed form.
        """
        if self._prompt is None and query.shape[2] <= MAX_DECODE_QUERIES:
            output = self._attend_compressed(query, mask, kwargs["scaling"])
        else:
            key, value = self._rebuild()
            output = inner(module, query, key, value, mask, **kwargs)
        if self.is_last and self.history is not None:
            self.history.release()
        return output

    def _attend_compressed(self, query: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, None]:
        key_decoder, value_decoder = self._decoders()
        rotated = self.codec.rope == "pre" and self.history is not None
        output_BHQD = torch.stack(
            [
                ragged_attention(
                    query[b],
                    self.key_stores[b],
                    self.value_stores[b],
                    key_decoder,
                    value_decoder,
                    scaling=scaling,
                    rotate=self.history.rotate_rows(b) if rotated else None,
                    mask_QT=None if mask is None else mask[b if mask.shape[0] > 1 else 0, 0],
                )
                for b in range(self.batch_size)
            ]
        )
        return output_BHQD.transpose(1, 2).contiguous(), None

    def _rebuild(self) -> tuple[Tensor, Tensor]:
        if self._prompt is not None:
            (key_coef, value_coef), self._prompt = self._prompt, None
        else:
            key_coef = torch.stack([store.dense() for store in self.key_stores])
            value_coef = torch.stack([store.dense() for store in self.value_stores])
        key_decoder, value_decoder = self._decoders()
        key = split_heads(key_coef @ key_decoder, self.head_dim)
        if self.codec.rope == "pre" and self.history is not None:
            key = self.history.rope().rotate(key)
        return key, split_heads(value_coef @ value_decoder, self.head_dim)

    def _decoders(self) -> tuple[Tensor, Tensor]:
        return (
            self.codec.key.decoder(self.dtype, self.device),
            self.codec.value.decoder(self.dtype, self.device),
        )

    # -- what generate() does to a cache --------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        return self.key_stores[0].length if self.key_stores else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens (the argument is zero or negative, as in `DynamicLayer`)."""
        if tokens_to_remove > 0:
            raise ValueError(f"`tokens_to_remove` must be zero or negative, got {tokens_to_remove}")
        if tokens_to_remove:
            for store in (*self.key_stores, *self.value_stores):
                store.crop(store.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([b for b in range(len(self.key_stores)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        # A boolean index keeps its True places, as with tensors.
        rows = torch.nonzero(indices).flatten() if indices.dtype == torch.bool else indices
        self._select(rows.tolist())

    def reset(self) -> None:
        self.key_stores, self.value_stores, self.is_initialized, self._prompt = [], [], False, None

    def offload(self) -> None:
        raise UserError("a compressed cache cannot be offloaded; leave `cache_implementation` unset")

    def _select(self, rows: list[int]) -> None:
        if not self.is_initialized:
            return
        self.key_stores = _picked(self.key_stores, rows)
        self.value_stores = _picked(self.value_stores, rows)
        self.batch_size = len(rows)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of per-token state held between steps."""
        for store in (*self.key_stores, *self.value_stores):
            yield from store.tensors()

    def __deepcopy__(self, memo: dict) -> "LowRankLayer":
        # The codec belongs to the model (or the calibration), not to the tokens: it is shared.
        twin = copy.copy(self)
        twin.history = copy.deepcopy(self.history, memo)
        twin.key_stores = [store.clone() for store in self.key_stores]
        twin.value_stores = [store.clone() for store in self.value_stores]
        memo[id(self)] = twin
        return twin


def _picked(stores: list[RaggedStore], rows: list[int]) -> list[RaggedStore]:
    # The first beam to follow a sequence takes its store over; only further ones cost a copy.
    taken: set[int] = set()
    picked = []
    for row in rows:
        picked.append(stores[row].clone() if row in taken else stores[row])
        taken.add(row)
    return picked


class LowRankCache(Cache):
    """Compressed keys and values for the full-attention layers of a model, native caches for the others.

    Pass it as ``past_key_values`` to the model or to `generate()`.
    """

    def __init__(self, model: PreTrainedModel, codecs: dict[int, LayerCodec]):
        """
        Args:
            model: the model the cache will serve; it is prepared for compressed attention.
            codecs: layer index → codec, for every layer of ``geometry_of(model).layers``.
        """
        prepare(model)
        self.geometry: KVGeometry = geometry_of(model)
        if set(codecs) != set(self.geometry.layers):
            raise UserError(f"`codecs` must cover the layers {self.geometry.layers}, got {tuple(sorted(codecs))}")
        self.history = _history_of(model)
        config = model.config.get_text_config(decoder=True)
        layers = list(DynamicCache(config=config).layers) or [None] * config.num_hidden_layers
        last = max(codecs)
        for index, codec in codecs.items():
            layers[index] = LowRankLayer(codec, self.history, is_last=index == last)
        super().__init__(layers=layers)

    # -- bytes ----------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor the compressed layers hold between steps."""
        for layer in self.compressed_layers():
            yield from layer.tensors()
        if self.history is not None:
            yield from self.history.tensors()

    def compressed_layers(self) -> list[LowRankLayer]:
        return [self.layers[index] for index in self.geometry.layers]

    @property
    def nbytes(self) -> int:
        """Bytes held for the tokens seen: coefficients, row indices, positions, room to grow."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def full_nbytes(self) -> int:
        """Bytes an uncompressed cache of the same tokens takes in the same layers, in the model's dtype."""
        layer = self.compressed_layers()[0]
        if not layer.is_initialized:
            return 0
        return self.geometry.full_nbytes(layer.batch_size * layer.get_seq_length(), layer.dtype.itemsize)

    @property
    def rate(self) -> float:
        """``nbytes / full_nbytes``; 1.0 for an empty cache."""
        return self.nbytes / self.full_nbytes if self.full_nbytes else 1.0

    # -- state shared by the layers -------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.history is not None and tokens_to_remove:
            self.history.crop(self.get_seq_length(self.geometry.layers[0]))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._select_history(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        batch = getattr(self.compressed_layers()[0], "batch_size", 0)
        super().batch_repeat_interleave(repeats)
        self._select_history(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select_history(indices)

    def reset(self) -> None:
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):
                # Up to 5.17 a native layer's own reset keeps its length, filled with zeros.
                layer.keys = layer.values = None
                layer.is_initialized = False
        super().reset()
        if self.history is not None:
            self.history.clear()

    def _select_history(self, index_B: Tensor) -> None:
        if self.history is not None:
            self.history.select(index_B)


def _history_of(model: PreTrainedModel) -> RopeHistory | None:
    module = rotary_module(model)
    apply = rotary_function(next(iter(attention_modules(model).values())))
    return None if module is None or apply is None else RopeHistory(module, apply)
