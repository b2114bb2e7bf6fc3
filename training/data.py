"""The stream of training blocks.

Shapes: B batch, T tokens of a block, S data sets.
"""

import copy
import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.text_data import Blocks, Documents, tokens_of

from .document_order import DocumentOrder, Share, ShareOfDocuments

# Where a stream stands: for each data set (epoch, document, token), and what `DocumentOrder.state` says. Ready for JSON.
Place = dict[str, list[Any]]


@dataclasses.dataclass
class Batch:
    """One forward pass of one process.

    Attributes:
        ids_BT: token ids, int64.
        position_BT: position of each token in its document within the block, int64. It restarts at 0 with every document,
            from which masks are made (:mod:`lowrank_kv.hf.document_isolation`); without these it runs through the block.
        place: where the stream continues after the batch; None for text that is only measured.
        document: the one that most of the tokens are of, where the batch is a block that is measured; None if unknown.
    """

    ids_BT: Tensor
    position_BT: Tensor
    place: Place | None = None
    document: int | None = None

    @classmethod
    def from_ids(cls, ids_BT: Tensor, starts_BT: Tensor | None, document: int | None = None) -> "Batch":
        """Blocks of token ids, int64, and a mask that is true where a document starts, bool; None for no boundaries."""
        index_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
        if starts_BT is None:
            return cls(ids_BT, index_BT, document=document)
        return cls(ids_BT, index_BT - (index_BT * starts_BT).cummax(dim=1).values, document=document)

    @classmethod
    def of_each(cls, blocks: Blocks, *, isolate: bool) -> "list[Batch]":
        """A batch of each block that is measured; with `isolate` positions start at 0 with every document."""
        return [
            cls.from_ids(ids_T[None], starts_T[None] if isolate else None, document)
            for ids_T, starts_T, document in zip(blocks.ids_NT, blocks.starts_NT, blocks.documents, strict=True)
        ]

    def to(self, device: torch.device) -> "Batch":
        moved = {"ids_BT": self.ids_BT.to(device), "position_BT": self.position_BT.to(device)}
        return dataclasses.replace(self, **moved)

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
    gives the next block is drawn by weight. Processes and the workers of their data loaders divide the work in one of two
    ways:

    - by blocks: batch n of process r of W holds blocks (n·B + i)·W + r of one stream, so that the same global batch is seen
      whatever the number of processes and workers. Everybody tokenizes everything.
    - by documents: each worker of each process has documents of its own, and reads and tokenizes only these. What is seen
      depends on the seed, on W, and on the number of workers V, and on nothing else.

    Either way worker w makes the batches w, w + V, …, which the loader hands out in turn.

    Args:
        sources: documents of each data set.
        weights: how often each is drawn, any positive numbers.
        tokenizer, length: blocks of `length` tokens.
        seed: of order and mixture.
        isolate: let positions start at 0 with every document.
        shuffle_buffer: documents that streamed data sets are shuffled among.
        by_documents: see above.
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
        by_documents: bool = False,
    ):
        self.sources, self.weights, self.tokenizer, self.length = sources, weights, tokenizer, length
        self.seed, self.isolate, self.shuffle_buffer = seed, isolate, shuffle_buffer
        self.by_documents = by_documents
        self.batch, self.rank, self.world, self.start, self.workers = 1, 0, 1, 0, 1
        self.places: list[Place] | None = None

    def shard(
        self,
        *,
        batch: int = 1,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
        workers: int = 1,
        places: list[Place] | None = None,
    ) -> "TrainingBlocks":
        """The batches of one process of `world`, from global block `start` on.

        Args:
            workers: V, at least 1, how many of each process read; what is divided by blocks does not depend on it.
            places: of the batches before block `start`, of each worker's last one in the order of their batches; of one of
                them where the stream is divided by blocks, whose places all are alike. With them, text before that block
                is not tokenized again, nor read again where `datasets` can go on; without them, the stream is read from
                its beginning.
        """
        twin = copy.copy(self)
        twin.batch, twin.rank, twin.world, twin.start = batch, rank, world, start
        twin.workers, twin.places = workers, places
        return twin

    def apart(self) -> "TrainingBlocks":
        """The same over data sets of its own: `datasets` notes in each where it is read, and a second reader moves that."""
        twin = copy.copy(self)
        twin.sources = copy.deepcopy(self.sources)
        return twin

    def first(self, count: int) -> list[Batch]:
        """The first `count` batches."""
        return list(itertools.islice(self, count))

    def __iter__(self) -> Iterator[Batch]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return self._by_documents(worker) if self.by_documents else self._by_blocks(worker, workers)

    def _by_blocks(self, worker: int, workers: int) -> Iterator[Batch]:
        picker = random.Random(self.seed)
        readers = self._readers(None, None if self.places is None else self.places[0])
        blocks = []
        for number in itertools.count():
            [reader] = picker.choices(readers, self.weights)
            if number < self.start and self.places is not None:
                continue
            block = reader.next_block(self.length)
            index = number - self.start
            batch_number = index // self.world // self.batch
            if index < 0 or index % self.world != self.rank or batch_number % workers != worker:
                continue
            blocks.append(block)
            if len(blocks) == self.batch:
                yield self._batch(blocks, readers)
                blocks = []

    def _by_documents(self, worker: int) -> Iterator[Batch]:
        """The batches of the worker that is asked first after block `start`, if `worker` is 0, of the next if it is 1, …"""
        done = self.start // (self.world * self.batch)  # batches of each process
        slot = (done + worker) % self.workers
        share = Share(self.rank * self.workers + slot, self.world * self.workers)
        readers = self._readers(share, None if self.places is None else self.places[slot])
        picker = random.Random(f"{self.seed}/{share.index}")
        for number in itertools.count(slot, self.workers):
            drawn = [picker.choices(readers, self.weights)[0] for _ in range(self.batch)]
            if number < done and self.places is not None:
                continue
            blocks = [reader.next_block(self.length) for reader in drawn]
            if number >= done:
                yield self._batch(blocks, readers)

    def _readers(self, share: Share | None, place: Place | None) -> list["_Reader"]:
        cursors = place["cursors"] if place else [(0, 0, 0)] * len(self.sources)
        states = place["states"] if place else [None] * len(self.sources)
        readers = []
        for i, rows in enumerate(self.sources):
            settings = rows, self.seed + 1 + i, self.shuffle_buffer
            order = DocumentOrder(*settings) if share is None else ShareOfDocuments(*settings, share, states[i])
            readers.append(_Reader(order, self.tokenizer, cursors[i]))
        return readers

    def _batch(self, blocks: list[tuple[list[int], list[int]]], readers: list["_Reader"]) -> Batch:
        ids = torch.tensor([block for block, _ in blocks])
        positions = [_positions(starts if self.isolate else [0], self.length) for _, starts in blocks]
        cursors, states = [list(each.cursor) for each in readers], [each.order.state() for each in readers]
        return Batch(ids, torch.tensor(positions), {"cursors": cursors, "states": states})


def _positions(starts: list[int], length: int) -> list[int]:
    ends = [*starts[1:], length]
    return [position for start, end in zip(starts, ends, strict=True) for position in range(end - start)]


class _Reader:
    """The endless tokens of one data set, from a cursor (epoch, document of that epoch, token of that document) on."""

    def __init__(self, order: DocumentOrder, tokenizer: PreTrainedTokenizerBase, cursor: tuple[int, int, int]):
        self.order, self.tokenizer = order, tokenizer
        self.epoch, self.document, self.token = cursor
        self._texts = order.texts(self.epoch, self.document)
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
                    f"{self.order.rows.info.description}, of `dataset.name`, has no document to train on; lower "
                    f"`dataset.heldout_share`, or, where it has fewer documents than there are processes and workers, set "
                    f"`dataset.divided_by: blocks`"
                )
            self.epoch, self.document = self.epoch + 1, 0
            self._texts = self.order.texts(self.epoch, 0)
            return self._next_text()
        return text
