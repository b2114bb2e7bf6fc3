"""The stream of training blocks.

Shapes: B batch, T tokens of a block, S data sets.
"""

import copy
import dataclasses
import itertools
import random
from collections.abc import Iterator

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.text_data import Documents, tokens_of


@dataclasses.dataclass
class Batch:
    """One forward pass of one process.

    Attributes:
        ids_BT: token ids, int64.
        position_BT: position of each token in its document within the block, int64. It restarts at 0 with every document,
            from which transformers infers the boundaries; without boundaries it runs through the block.
        cursor_S3: (epoch, document, token) at which each data set continues after the batch, int64; None for text that is
            only measured.
    """

    ids_BT: Tensor
    position_BT: Tensor
    cursor_S3: Tensor | None = None

    @classmethod
    def from_ids(cls, ids_BT: Tensor, starts_BT: Tensor | None) -> "Batch":
        """Blocks of token ids, int64, and a mask that is true where a document starts, bool; None for no boundaries."""
        index_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
        if starts_BT is None:
            return cls(ids_BT, index_BT)
        return cls(ids_BT, index_BT - (index_BT * starts_BT).cummax(dim=1).values)

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.ids_BT.to(device), self.position_BT.to(device), self.cursor_S3)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The model's arguments."""
        return {"input_ids": self.ids_BT, "position_ids": self.position_BT}

    @property
    def targets(self) -> Tensor:
        """The token to predict at position t, (B, T − 1) int64; −100 (ignored) where the next token starts a document."""
        return self.ids_BT[:, 1:].masked_fill(self.position_BT[:, 1:] == 0, -100)


class TrainingBlocks(torch.utils.data.IterableDataset):
    """An endless, deterministic stream of batches of packed blocks, mixed from several data sets.

    Every data set is read document by document in a shuffled order, anew each epoch, and cut into blocks; which data set
    gives the next block is drawn by weight. The order of blocks depends on the seed alone: batch n of process r of W holds
    blocks (n·B + i)·W + r, so that the same global batch is seen whatever the number of processes, and worker w of V of a
    data loader makes the batches w, w + V, …, which the loader hands out in turn. Every process and worker reads the
    full stream and keeps its shard; tokenizing costs little beside training.

    Args:
        sources: documents of each data set.
        weights: how often each is drawn, any positive numbers.
        tokenizer, length: blocks of `length` tokens.
        seed: of order and mixture.
        isolate: let positions start at 0 with every document.
        shuffle_buffer: documents that streamed data sets are shuffled among.
    """

    def __init__(
        self,
        sources: list[Documents],
        weights: list[float],
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        *,
        seed: int,
        isolate: bool = True,
        shuffle_buffer: int = 10_000,
    ):
        self.sources, self.weights, self.tokenizer, self.length = sources, weights, tokenizer, length
        self.seed, self.isolate, self.shuffle_buffer = seed, isolate, shuffle_buffer
        self.batch, self.rank, self.world, self.start = 1, 0, 1, 0
        self.cursor_S3: Tensor | None = None

    def shard(
        self, *, batch: int = 1, rank: int = 0, world: int = 1, start: int = 0, cursor_S3: Tensor | None = None
    ) -> "TrainingBlocks":
        """The batches of one process of `world`, from global block `start` on.

        Args:
            cursor_S3: cursor of the batch before block `start`. With it, text before that block is not tokenized again
                (that of a streamed data set is still read); without it, the stream is read from its beginning.
        """
        twin = copy.copy(self)
        twin.batch, twin.rank, twin.world, twin.start, twin.cursor_S3 = batch, rank, world, start, cursor_S3
        return twin

    def first(self, count: int) -> list[Batch]:
        """The first `count` batches."""
        return list(itertools.islice(self, count))

    def __iter__(self) -> Iterator[Batch]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        picker = random.Random(self.seed)
        cursors = [(0, 0, 0)] * len(self.sources) if self.cursor_S3 is None else self.cursor_S3.tolist()
        readers = [
            _Reader(rows, self.tokenizer, self.seed + 1 + i, self.shuffle_buffer, cursors[i])
            for i, rows in enumerate(self.sources)
        ]
        ids, positions = [], []
        for number in itertools.count():
            [reader] = picker.choices(readers, self.weights)
            if number < self.start and self.cursor_S3 is not None:
                continue
            block, starts = reader.next_block(self.length)
            index = number - self.start
            batch_number = index // self.world // self.batch
            if index < 0 or index % self.world != self.rank or batch_number % workers != worker:
                continue
            ids.append(block)
            positions.append(_positions(starts if self.isolate else [0], self.length))
            if len(ids) == self.batch:
                cursor_S3 = torch.tensor([reader.cursor for reader in readers])
                yield Batch(torch.tensor(ids), torch.tensor(positions), cursor_S3)
                ids, positions = [], []


def _positions(starts: list[int], length: int) -> list[int]:
    ends = [*starts[1:], length]
    return [position for start, end in zip(starts, ends, strict=True) for position in range(end - start)]


class _Reader:
    """The endless tokens of one data set, from a cursor (epoch, document of that epoch, token of that document) on."""

    def __init__(
        self,
        rows: Documents,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        shuffle_buffer: int,
        cursor: tuple[int, int, int],
    ):
        self.rows, self.tokenizer, self.seed, self.shuffle_buffer = rows, tokenizer, seed, shuffle_buffer
        self.epoch, self.document, self.token = cursor
        self._texts = self._epoch_from(self.document)
        self._tokens: list[int] | None = None

    @property
    def cursor(self) -> tuple[int, int, int]:
        return self.epoch, self.document, self.token

    def next_block(self, length: int) -> tuple[list[int], list[int]]:
        """The next `length` token ids, and the indices among them at which documents start."""
        ids: list[int] = []
        starts = []
        while len(ids) < length:
            if self._tokens is None:
                self._tokens = tokens_of(self._next_text(), self.tokenizer)
            segment = self._tokens[self.token : self.token + length - len(ids)]
            if segment:
                starts.append(len(ids))
                ids += segment
                self.token += len(segment)
            if self.token >= len(self._tokens):
                self.document, self.token, self._tokens = self.document + 1, 0, None
        return ids, starts

    def _next_text(self) -> str:
        text = next(self._texts, None)
        if text is None:
            if self.document == 0:
                raise UserError(
                    "a data set of `dataset.name` has no document to train on; lower `dataset.heldout_share`"
                )
            self.epoch, self.document = self.epoch + 1, 0
            self._texts = self._epoch_from(0)
            return self._next_text()
        return text

    def _epoch_from(self, document: int) -> Iterator[str]:
        if isinstance(self.rows, datasets.IterableDataset):
            rows = self.rows.shuffle(seed=self.seed, buffer_size=self.shuffle_buffer)
            rows.set_epoch(self.epoch)
            # In a data loader's worker, plain iteration would give each worker other files; `iter` gives all.
            texts = (text for batch in rows.iter(batch_size=1) for text in batch["text"])
            return itertools.islice(texts, document, None)
        order = list(range(len(self.rows)))
        random.Random(self.seed + 1_000_003 * self.epoch).shuffle(order)
        return (self.rows[index]["text"] for index in order[document:])
