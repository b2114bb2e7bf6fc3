"""A cache layer whose tokens keep different numbers of coefficients (DynaKV, section 3.2).

Shapes: B batch, H query heads, G KV heads, D head dim, C = G·D, Q new tokens, T cached tokens.
"""

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_kv.codec import Codec, Encoded
from lowrank_kv.eviction import Eviction
from lowrank_kv.hf.backends import Backend
from lowrank_kv.hf.cache.codec_layer import CodecLayer
from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES, CallContext
from lowrank_kv.hf.cache.per_sequence_layer import SequenceLayer, mask_of_sequence
from lowrank_kv.ops.gradients import without_gradients
from lowrank_kv.ops.native.ragged_view import append_few, view_of
from lowrank_kv.ops.ragged_attention import RaggedTokens, ragged_attention
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.memory_report import POSITIONS
from lowrank_kv.stores.ragged import RaggedStore


class RaggedSequence:
    """One sequence's coefficients, and the positions of its tokens once some of them have been evicted."""

    def __init__(self, key: RaggedStore, value: RaggedStore):
        self.key, self.value = key, value
        self.num_evicted = 0
        self.min_crop_length = 0
        self._position: GrowingTensor | None = None  # of the stores' rows; row t is token t while it is None

    @property
    def length(self) -> int:
        """Tokens seen. A value is stored after its key: a call that ends between them can be cropped away."""
        return self.value.length + self.num_evicted

    def note_appended(self) -> None:
        """Note the positions of the rows that both stores have been given since this was last called."""
        if self._position is not None:
            start = self._position.length + self.num_evicted
            self._position.append(torch.arange(start, self.length, dtype=torch.int32, device=self.key.device))

    def positions(self) -> Tensor | None:
        """The position of each row of the stores, (N,) int64; None where row t is token t."""
        return None if self._position is None else self._position.rows.long()

    def rows_at(self, positions: slice) -> slice:
        """The rows of the tokens at `positions`, if neither these nor any after them have been evicted."""
        return slice(positions.start - self.num_evicted, positions.stop - self.num_evicted)

    def evict(self, score_PT: Tensor, prompt: slice, eviction: Eviction) -> None:
        """See :meth:`SequenceState.evict`; all heads share their coefficients (P = 1)."""
        position_N = torch.arange(self.length, device=score_PT.device) if self._position is None else self.positions()
        kept = eviction.rows_kept(score_PT, position_N[None], prompt)
        if kept is None:
            return
        [row_N], min_crop_length = kept
        position = GrowingTensor(position_N[row_N].to(torch.int32))
        num_evicted = self.num_evicted + self.key.length - len(row_N)
        key, value = self.key.kept(row_N), self.value.kept(row_N)
        # No call is between these: an interrupt finds all of them done, or none.
        self.key, self.value, self._position = key, value, position
        self.num_evicted, self.min_crop_length = num_evicted, min_crop_length

    def crop(self, length: int) -> None:
        rows = length - self.num_evicted
        self.key.crop(rows)
        self.value.crop(rows)
        if self._position is not None:
            self._position.crop(rows)

    def clone(self) -> "RaggedSequence":
        twin = copy.copy(self)
        twin.key, twin.value = self.key.clone(), self.value.clone()
        twin._position = None if self._position is None else self._position.clone()
        return twin

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.key.tensors_by_kind()
        yield from self.value.tensors_by_kind()
        if self._position is not None:
            yield POSITIONS, self._position.buffer


class RaggedLayer(SequenceLayer, CodecLayer):
    """A ragged store for each sequence."""

    def new_sequence(self) -> RaggedSequence:
        def store(codec: Codec) -> RaggedStore:
            return RaggedStore(codec.width, dtype=self.dtype, device=self.device, quantization=self.codec.quantization)

        return RaggedSequence(store(self.codec.key), store(self.codec.value))

    def shared_by_sequences(self) -> list[Any]:
        return [self._decoders.key_CC, self._decoders.value_CC, self.codec.settings, self.codec.quantization]

    def start(self) -> None:
        SequenceLayer.start(self)
        CodecLayer.start(self)

    def append(self, key_BGQD: Tensor, value_BGQD: Tensor, context: CallContext) -> None:
        if self.codec.eviction.is_on:
            self.check_not_padded_right(context.mask)
        new = None
        if self._encoder is not None and self.codec.quantization is None and self.get_seq_length():
            # Every decoded token is appended by the call that encodes it.
            targets = [(view_of(each.key), view_of(each.value)) for each in self.sequences]
            new = self._encode_compiled(key_BGQD, value_BGQD, context.rope, targets)
        if new is None:
            super().append(key_BGQD, value_BGQD, context)
        elif new.are_stored:
            for sequence in self.sequences:
                sequence.note_appended()
        else:  # some store had no room: now they grow
            self._append_few(new.coef_SBTC.to(self.dtype), new.rank_SBT.tolist())

    def store(self, key: Encoded, value: Encoded) -> None:
        count = key[0].shape[1]
        if count > MAX_DECODE_QUERIES:
            for b, sequence in enumerate(self.sequences):
                sequence.key.append(key[0][b], key[1][b], is_prompt=True)
                sequence.value.append(value[0][b], value[1][b], is_prompt=True)
                sequence.note_appended()
            return
        # The host waits for one copy of the ranks, not for two.
        self._append_few((key[0], value[0]), torch.stack([key[1], value[1]]).tolist())

    def _append_few(self, coef_SBTC: Sequence[Tensor], ranks_SBT: list[list[list[int]]]) -> None:
        """Append a few tokens to each sequence; S is keys, then values."""
        for b, sequence in enumerate(self.sequences):
            append_few(sequence.key, coef_SBTC[0][b], ranks_SBT[0][b])
            append_few(sequence.value, coef_SBTC[1][b], ranks_SBT[1][b])
            sequence.note_appended()

    def dense(self) -> tuple[Tensor, Tensor]:
        return (
            torch.stack([sequence.key.dense() for sequence in self.sequences]),
            torch.stack([sequence.value.dense() for sequence in self.sequences]),
        )

    def truncate(self, length: int) -> None:
        SequenceLayer.truncate(self, length)
        CodecLayer.truncate(self, length)

    def clear(self) -> None:
        SequenceLayer.clear(self)
        CodecLayer.clear(self)

    def attend_cached(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """A prompt, and long chunks after it, run `inner` on this layer's rebuilt keys and values (a prompt on exact ones if
        configured so); a few queries at a time attend in the compressed form."""
        if not self.codec.eviction.is_on:
            return self._attend(module, query, mask, inner, self.get_seq_length(), **kwargs)[0], None
        end, queries = self.get_seq_length(), query.shape[2]
        if end - queries < self.prompts.end < end:
            # Drafts came with the end of a prompt. They see the tokens left of it, as they would in a later call.
            if mask is None:
                mask = torch.ones(queries, end, dtype=torch.bool, device=query.device).tril(end - queries)[None, None]
            prompt = self.prompts.end - end + queries
        else:
            prompt = queries
        rows = None if mask is None else mask[:, :, :prompt]
        output, key = self._attend(module, query[:, :, :prompt], rows, inner, end - queries + prompt, **kwargs)
        self.evict(query, mask, kwargs["scaling"], self.codec.eviction, functools.partial(self._prompt_keys, key))
        if prompt < queries:
            later, _ = self._attend(module, query[:, :, prompt:], mask[:, :, prompt:], inner, end, **kwargs)
            output = torch.cat([output, later], dim=1)
        return output, None

    def _attend(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, length: int, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of queries that see only the first `length` tokens, and the rotated keys of these, (B, G, T, D), if it
        needed all of them."""
        if self.is_decoding(query):
            return self._attend_compressed(query, mask, inner.scoring(kwargs)), None
        if any(sequence.min_crop_length for sequence in self.sequences):
            return self._attend_rebuilt(module, query, mask, inner, length, **kwargs), None
        is_exact = self.attends_exactly
        key, value = (states[:, :, :length] for states in self._rebuild())
        output = inner(module, query, key, value, None if mask is None else mask[..., :length], **kwargs)[0]
        return output if is_exact else without_gradients(output, query), key

    def _prompt_keys(self, key: Tensor | None, b: int, prompt: slice) -> Tensor:
        """Rotated keys of a sequence's prompt, (G, T, D): as this call's attention saw them if it saw all, else rebuilt."""
        if key is not None:
            return key[b, :, prompt]
        sequence = self.sequences[b]
        rope = None if self.history is None else self.history.rope_at(b, prompt)
        return self._keys(sequence.key.dense()[None, sequence.rows_at(prompt)], rope)[0]

    def _attend_rebuilt(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, length: int, **kwargs: Any
    ) -> Tensor:
        """`inner` on those of the first `length` tokens that each sequence still has; their number may differ between
        sequences."""
        outputs, later = [], self.get_seq_length() - length
        for b, sequence in enumerate(self.sequences):
            rows = slice(0, sequence.key.length - later)
            key, value = (states[:, :, rows] for states in self._rebuild_one(b))
            mask_11QT = None if mask is None else _mask_of(mask, b, sequence)[None, None, :, rows]
            outputs.append(inner(module, query[b : b + 1], key, value, mask_11QT, **kwargs)[0])
        return without_gradients(torch.cat(outputs), query)

    def _attend_compressed(self, query: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
        sequences = [
            RaggedTokens(
                sequence.key,
                sequence.value,
                None if self.history is None else self.history.rotation(b, self.device),
                sequence.positions(),
                None if mask is None else _mask_of(mask, b, sequence),
            )
            for b, sequence in enumerate(self.sequences)
        ]
        return ragged_attention(query, sequences, self._decoders, scoring)

    def _rebuild_one(self, b: int) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of the tokens one sequence still has, (1, G, N, D) each."""
        sequence, rope = self.sequences[b], None
        if self.history is not None:
            position_N = sequence.positions()
            rope = self.history.rope_at(b, slice(0, sequence.length) if position_N is None else position_N)
        return self._states(sequence.key.dense()[None], sequence.value.dense()[None], rope)


def _mask_of(mask: Tensor, b: int, sequence: RaggedSequence) -> Tensor:
    """The mask's columns of the tokens a sequence still has, (Q, N)."""
    mask_QT = mask_of_sequence(mask, b)
    position_N = sequence.positions()
    return mask_QT if position_N is None else mask_QT[:, position_N]
