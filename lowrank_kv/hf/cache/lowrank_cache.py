"""A compressed cache that stock `generate()` drives."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from lowrank_kv.hf.attention import PREPARED
from lowrank_kv.hf.cache.layer import CompressedLayer
from lowrank_kv.hf.cache.shared_memory import nbytes_within
from lowrank_kv.hf.geometry import KVGeometry, attention_modules, geometry_of
from lowrank_kv.hf.prepare import prepare
from lowrank_kv.hf.recurrent_layers import WholeCalls, check_forgets, clear, counts_tokens, forget, is_recurrent
from lowrank_kv.hf.rope import RopeHistory, check_same_length
from lowrank_kv.hf.rotary import Rotary, rotary_function
from lowrank_kv.stores.memory_report import POSITIONS, MemoryReport
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.values import whole_number


class LowRankCache(WholeCalls):
    """Compressed keys and values for the full-attention layers of a model, native caches for the others.

    Pass it as ``past_key_values`` to the model or to `generate()`.

    Attributes:
        is_given_again: whether the first call of a `generate()` is about to give it the tokens that it holds a second time.
    """

    is_given_again = False

    def __init__(self, model: PreTrainedModel, compressed: dict[int, CompressedLayer]):
        """
        Args:
            model: the model the cache will serve; it is prepared for compressed attention.
            compressed: layer index → an empty layer, for every layer of ``geometry_of(model).layers``.
        """
        prepare(model)
        self.geometry: KVGeometry = geometry_of(model)
        if set(compressed) != set(self.geometry.layers):
            raise UserError(
                f"`compressed` must cover the layers {self.geometry.layers}, got {tuple(sorted(compressed))}"
            )
        modules = attention_modules(model)
        # Some families leave the keys of some layers as they are.
        rotating = [i for i, layer in compressed.items() if layer.rotates and rotary_function(modules[i]) is not None]
        self.history = _history_of(model) if rotating else None
        config = model.config.get_text_config(decoder=True)
        layers = list(DynamicCache(config=config).layers) or [None] * config.num_hidden_layers
        last = max(compressed)
        for index, layer in compressed.items():
            history, owner = self.history if index in rotating else None, getattr(modules[index], PREPARED).identity
            # By the last layer, which may compress for others before it, and rotates or not.
            released = self.history if index == last else None
            layer.bind(owner, self.geometry, history, released=released)
            layers[index] = layer
        self._first_compressed = min(compressed)  # layer, which stores a call's tokens before the others do
        super().__init__(layers=layers)

    # -- bytes ----------------------------------------------------------------------------------------------------

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of all state of the compressed layers between steps, each byte once."""
        seen: dict[int, Tensor] = {}  # by identity; beams share what is found once for their text
        for layer in self.compressed_layers():
            for kind, tensor in layer.tensors_by_kind():
                if id(tensor) not in seen:
                    seen[id(tensor)] = tensor
                    yield kind, tensor
        if self.history is not None:
            for tensor in self.history.tensors():
                yield POSITIONS, tensor

    def memory(self) -> MemoryReport:
        """Bytes by kind, of an uncompressed cache and of what all caches share; ``print(cache.memory())`` shows a table."""
        roots = [getattr(layer, name) for layer in self.compressed_layers() for name in layer.shared]
        return MemoryReport.from_tensors(self.tensors_by_kind(), self.full_nbytes, nbytes_within(roots))

    def compressed_layers(self) -> list[CompressedLayer]:
        return [self.layers[index] for index in self.geometry.layers]

    def expect_prompt(self, length: int) -> None:
        """A `generate()` begins; its prompt ends at place `length` of the text, of which the cache may hold the beginning.
        The rest comes in one chunk or several. 0 takes back what was expected.

        Raises:
            UserError: the cache holds as much already.
        """
        held = self.get_seq_length()
        is_place = not whole_number("length", length) or length > held
        require(is_place, "length", length, f"more than the {held} tokens that the cache holds: where the prompt ends")
        for layer in self.compressed_layers():
            layer.expect_prompt(length)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, room to grow included; :meth:`memory` divides them by kind."""
        return sum(tensor.nbytes for _, tensor in self.tensors_by_kind())

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
        return self.memory().rate

    # -- state shared by the layers -------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`CompressedLayer.update`.

        Raises:
            UserError: the layers hold different numbers of tokens. Rotations tell it, too, where they are remembered.
        """
        first, layer = self.layers[self._first_compressed], self.layers[layer_idx]
        past, new = layer.get_seq_length(), key_states.shape[2]
        if layer is first:
            # Native layers do not ask: those before this one have stored the call's tokens, those behind it have not.
            for index, native in enumerate(self.layers):
                if counts_tokens(native) and not isinstance(native, CompressedLayer):
                    check_same_length(past, native.get_seq_length() - (new if index < layer_idx else 0))
        elif isinstance(layer, CompressedLayer) and first.is_initialized:
            check_same_length(first.get_seq_length(), past + new)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def check_even(self) -> None:
        """Raise :class:`UserError` unless all layers hold as many tokens, as between calls they do."""
        expected = self.layers[self._first_compressed].get_seq_length()
        for layer in self.layers:
            if counts_tokens(layer):
                check_same_length(expected, layer.get_seq_length())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of those that all layers hold. ``crop(0)`` makes a cache whole again
        after a call that was cut short: the layers before the one that failed have stored its tokens.

        Raises:
            UserError: some layer cannot give these tokens back, or a call was cut short after a recurrent layer had run.
        """
        removed = -whole_number("tokens_to_remove", tokens_to_remove)
        recurrent = [layer for layer in self.layers if is_recurrent(layer)]
        counting = [layer for layer in self.layers if counts_tokens(layer)]
        held = [layer.get_seq_length() for layer in self.compressed_layers()]
        length = min(held + [layer.get_seq_length() for layer in counting]) - removed
        for layer in counting:  # all are asked before any forgets
            _check_crop(layer, length)
        if length:
            self.check_not_cut_short()
            for layer in recurrent:
                check_forgets(layer, removed, length)
        for layer in counting:
            if isinstance(layer, CompressedLayer):
                layer.truncate(length)  # one that has the right length may hold a part of a token more
            elif not length and isinstance(layer, DynamicLayer):
                _empty(layer)  # another number of sequences may come next
            elif layer.get_seq_length() != length or getattr(layer, "record_past", False):
                layer.crop(length - layer.get_seq_length())
        for layer in recurrent:
            if length:
                forget(layer, removed)
            else:
                clear(layer)
        self.end_call()
        if self.history is not None:
            self.history.crop(length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.compressed_layers()[0].sequences_at(beam_idx)  # refused before a native layer moves
        with self._moving_sequences():
            super().reorder_cache(beam_idx)
            self._select_history(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        require(whole_number("repeats", repeats) >= 1, "repeats", repeats, "at least 1")
        batch = getattr(self.compressed_layers()[0], "batch_size", 0)
        row_B = torch.arange(batch, device="cpu").repeat_interleave(repeats)
        with self._moving_sequences():
            for layer in self.layers:
                # These have no method of their own for it.
                layer.reorder_cache(row_B) if is_recurrent(layer) else layer.batch_repeat_interleave(repeats)
            self._select_history(row_B)

    def batch_select_indices(self, indices: Tensor) -> None:
        if isinstance(indices, slice):  # as a list, it serves stock caches, too
            indices = range(getattr(self.compressed_layers()[0], "batch_size", 0))[indices]
        indices = torch.as_tensor(indices, device=indices.device if isinstance(indices, Tensor) else "cpu")
        rows = self.compressed_layers()[0].sequences_at(indices)  # refused before a native layer moves
        row_B = torch.tensor(rows, dtype=torch.int64, device="cpu")
        with self._moving_sequences():
            for layer in self.layers:
                layer.reorder_cache(row_B) if is_recurrent(layer) else layer.batch_select_indices(indices)
            self._select_history(indices)

    @contextlib.contextmanager
    def _moving_sequences(self) -> Iterator[None]:
        """Sequences move in all layers. Wrong arguments are refused before they move in any; where an interrupt or a lack of
        memory leaves some layers behind, the cache is emptied: it would pair keys of one sequence with those of another."""
        try:
            yield
        except UserError:
            raise
        except BaseException:  # an interrupt, too
            self.reset()
            raise

    def reset(self) -> None:
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):
                _empty(layer)
            elif is_recurrent(layer):
                clear(layer)
        super().reset()
        self.end_call()
        if self.history is not None:
            self.history.clear()

    def _select_history(self, index_B: Tensor) -> None:
        if self.history is not None:
            self.history.select(index_B)


def _empty(layer: DynamicLayer) -> None:
    """Let a native layer hold nothing, and next any number of sequences."""
    # Up to 5.17 its own reset keeps its length, filled with zeros.
    layer.keys = layer.values = None
    layer.is_initialized = False
    layer.reset()


def _check_crop(layer: CacheLayerMixin, length: int) -> None:
    """Raise :class:`UserError` where a layer cannot forget the tokens after the first `length`."""
    if isinstance(layer, CompressedLayer):
        layer.check_crop(length)
    elif isinstance(layer, DynamicSlidingWindowLayer):
        held, window = layer.get_seq_length(), layer.sliding_window
        if held == length or held < window:
            return
        left = layer.keys.shape[-2] - (held - length)  # of what it still has, which may be more than the window
        if length and (not layer.record_past or left < min(window - 1, length)):
            raise UserError(
                f"the cache cannot be cropped to {length} tokens: a layer with a sliding window of {window} has forgotten "
                f"those before it; call `cache.activate_past_recording()` before the tokens that may be taken back, or read "
                f"the text again"
            )


def _history_of(model: PreTrainedModel) -> RopeHistory | None:
    rotary = Rotary.from_model(model)
    return None if rotary is None else RopeHistory(rotary)
