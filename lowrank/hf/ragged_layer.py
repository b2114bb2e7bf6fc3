"""A cache layer whose tokens keep different numbers of coefficients (DynaKV, section 3.2).

Shapes: B batch, H query heads, G KV heads, D head dim, C = G·D, Q new tokens, T cached tokens.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowrank.codec import Codec, Encoded
from lowrank.eviction import check_croppable
from lowrank.growing import GrowingTensor
from lowrank.hf.backends import Backend
from lowrank.hf.codec_layer import CodecLayer
from lowrank.hf.layer import MAX_DECODE_QUERIES, join_sequences
from lowrank.hf.rope import Rope
from lowrank.hf.sequence_layer import SequenceLayer
from lowrank.memory import POSITIONS
from lowrank.ops.ragged_attention import ragged_attention
from lowrank.ops.ragged_table import append_few, entrance_of
from lowrank.ragged import RaggedStore


class RaggedSequence:
    """One sequence's coefficients, and where its tokens were once some of them have been evicted."""

    def __init__(self, key: RaggedStore, value: RaggedStore):
        self.key, self.value = key, value
        self.length = 0  # tokens seen
        self.fixed = 0  # tokens that can no longer be cropped: some of them are gone
        self._place: GrowingTensor | None = None  # of the stores' rows; row t is token t while it is None

    def note(self, count: int) -> None:
        """So many tokens have been appended to both stores."""
        if self._place is not None:
            new_N = torch.arange(self.length, self.length + count, dtype=torch.int32, device=self.key.device)
            self._place.append(new_N)
        self.length += count

    def places(self) -> Tensor | None:
        """The place of each row of the stores, (N,) int64; None where row t is token t."""
        return None if self._place is None else self._place.rows.long()

    def evict(self, row_N: Tensor) -> None:
        """Keep the rows at `row_N`, which rise."""
        place_N = torch.arange(self.length, device=row_N.device) if self._place is None else self._place.rows
        self._place = GrowingTensor(place_N[row_N].to(torch.int32))
        self.key.keep(row_N)
        self.value.keep(row_N)
        self.fixed = self.length

    def crop(self, length: int) -> None:
        check_croppable(length, self.fixed)
        rows = length if self._place is None else self._place.length - (self.length - length)
        self.key.crop(rows)
        self.value.crop(rows)
        if self._place is not None:
            self._place.crop(rows)
        self.length = length

    def clone(self) -> "RaggedSequence":
        twin = copy.copy(self)
        twin.key, twin.value = self.key.clone(), self.value.clone()
        twin._place = None if self._place is None else self._place.clone()
        return twin

    def held(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.key.held()
        yield from self.value.held()
        if self._place is not None:
            yield POSITIONS, self._place.buffer


class RaggedLayer(SequenceLayer, CodecLayer):
    """A ragged store for each sequence."""

    def new_sequence(self) -> RaggedSequence:
        def store(codec: Codec) -> RaggedStore:
            return RaggedStore(codec.width, dtype=self.dtype, device=self.device, quantisation=self.codec.quantisation)

        return RaggedSequence(store(self.codec.key), store(self.codec.value))

    def start(self) -> None:
        SequenceLayer.start(self)
        CodecLayer.start(self)

    def take(self, key_BGQD: Tensor, value_BGQD: Tensor, rope: Rope | None) -> None:
        is_prompt = not self.get_seq_length()
        if is_prompt or self.codec.quantisation is not None or not self._encodes_compiled(key_BGQD, value_BGQD, rope):
            super().take(key_BGQD, value_BGQD, rope)
            return
        # Every decoded token: into the stores in the call that encodes it.
        count = key_BGQD.shape[2]
        entrances = [
            (entrance_of(sequence.key, count), entrance_of(sequence.value, count), sequence.key.length)
            for sequence in self.sequences
        ]
        coef, rank, appended = self._encode_compiled(key_BGQD, value_BGQD, rope, entrances)
        ranks = rank.tolist()
        for b, sequence in enumerate(self.sequences):
            for side, store in enumerate((sequence.key, sequence.value)):
                done, own = appended[side][b], ranks[side][b]
                for each in own[:done]:
                    store.count_one(each)
                if done < count:
                    append_few(store, coef[side, b, done:], own[done:])
            sequence.note(count)

    def store(self, key: Encoded, value: Encoded) -> None:
        count = key[0].shape[1]
        if count > MAX_DECODE_QUERIES:
            for b, sequence in enumerate(self.sequences):
                sequence.key.append(key[0][b], key[1][b], is_prompt=True)
                sequence.value.append(value[0][b], value[1][b], is_prompt=True)
                sequence.note(count)
            return
        key_ranks, value_ranks = torch.stack([key[1], value[1]]).tolist()  # one copy for which the host waits, not two
        for b, sequence in enumerate(self.sequences):
            append_few(sequence.key, key[0][b], key_ranks[b])
            append_few(sequence.value, value[0][b], value_ranks[b])
            sequence.note(count)

    def dense(self) -> tuple[Tensor, Tensor]:
        return (
            torch.stack([sequence.key.dense() for sequence in self.sequences]),
            torch.stack([sequence.value.dense() for sequence in self.sequences]),
        )

    def clear(self) -> None:
        SequenceLayer.clear(self)
        CodecLayer.clear(self)

    def attend_cached(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """A prompt, and long chunks after it, run `inner` on this layer's rebuilt keys and values (a prompt on the exact
        ones, where so configured); a few queries at a time attend in the compressed form."""
        if self.is_decoding(query):
            return self._attend_compressed(query, mask, kwargs["scaling"], inner.softcap(kwargs))
        if any(sequence.fixed for sequence in self.sequences):
            # Sequences no longer have equally many tokens.
            outputs, keys = [], []
            for b, sequence in enumerate(self.sequences):
                key, value = self._rebuild_one(b)
                mask_1QT = _mask_of(mask, b, sequence)[None, None] if mask is not None else None
                outputs.append(inner(module, query[b : b + 1], key, value, mask_1QT, **kwargs)[0])
                keys.append(key[0])
            output = torch.cat(outputs), None
        else:
            key, value = self._rebuild()
            output = inner(module, query, key, value, mask, **kwargs)
            keys = list(key)
        if self.codec.eviction.is_on and query.shape[2] > MAX_DECODE_QUERIES:
            for b, key_GTD in enumerate(keys):
                self._evict(b, query[b], key_GTD, mask, kwargs["scaling"])
        return output

    def _evict(self, b: int, query_HQD: Tensor, key_GTD: Tensor, mask: Tensor | None, scaling: float) -> None:
        """Of the tokens just read, forget those that the last of them do not look at. Latents are shared by the heads, so
        all heads choose together."""
        sequence, eviction = self.sequences[b], self.codec.eviction
        new = query_HQD.shape[1]
        present_Q = None if mask is None else _mask_of(mask, b, sequence)[:, -new:].any(dim=0)
        [score_Q] = eviction.scores(query_HQD, key_GTD[:, -new:], scaling, present_Q, parts=1)
        count = eviction.count(new if present_Q is None else int(present_Q.sum()))
        first = sequence.key.length - new
        # Of equal scores, which pooling makes, the first: whatever padding there is beside them.
        kept_N = score_Q.sort(descending=True, stable=True).indices[:count].sort().values + first
        sequence.evict(torch.cat([torch.arange(first, device=kept_N.device), kept_N]))

    def _attend_compressed(
        self, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
    ) -> tuple[Tensor, None]:
        key_decoder, value_decoder = self._decoder_pair
        outputs = [
            ragged_attention(
                query[b],
                sequence.key,
                sequence.value,
                key_decoder,
                value_decoder,
                scaling=scaling,
                rotation=None if self.history is None else self.history.rotation(b, self.device),
                softcap=softcap,
                place_T=sequence.places(),
                mask_QT=None if mask is None else _mask_of(mask, b, sequence),
            )
            for b, sequence in enumerate(self.sequences)
        ]
        return join_sequences(outputs), None

    def _rebuild_one(self, b: int) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of the tokens one sequence still has, (1, G, N, D) each."""
        sequence, rope = self.sequences[b], None
        if self.history is not None:
            place_N = sequence.places()
            rope = self.history.picked(b, slice(0, sequence.length) if place_N is None else place_N)
        return self._states(sequence.key.dense()[None], sequence.value.dense()[None], rope)


def _mask_of(mask: Tensor, b: int, sequence: RaggedSequence) -> Tensor:
    """The mask's columns of the tokens a sequence still has, (Q, N)."""
    mask_QT = mask[b if mask.shape[0] > 1 else 0, 0]
    place_N = sequence.places()
    return mask_QT if place_N is None else mask_QT[:, place_N]
