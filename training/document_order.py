"""In what order the documents of one data set are read, by everybody or by one of several readers that share them."""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import datasets
from datasets.distributed import split_dataset_by_node

from lowrank_kv.utils.text_data import Documents, texts_in


@dataclasses.dataclass(frozen=True)
class Share:
    """The documents of one reader: share `index` of `count`, disjoint from the others', all of them together everything."""

    index: int = 0
    count: int = 1


class DocumentOrder:
    """The documents of one data set in a shuffled order, anew each epoch.

    Args:
        rows: the data set.
        seed: of the order.
        shuffle_buffer: documents that a streamed data set is shuffled among.
    """

    def __init__(self, rows: Documents, seed: int, shuffle_buffer: int):
        self.rows, self.seed, self.shuffle_buffer = rows, seed, shuffle_buffer

    def texts(self, epoch: int, document: int) -> Iterator[str]:
        """The texts of an epoch from its document number `document` on."""
        if isinstance(self.rows, datasets.IterableDataset):
            rows = self.rows.shuffle(seed=self.seed, buffer_size=self.shuffle_buffer)
            rows.set_epoch(epoch)
            return itertools.islice(texts_in(rows), document, None)
        return (self.rows[index]["text"] for index in self._order(epoch)[document:])

    def state(self) -> dict[str, Any] | None:
        """What :meth:`texts` needs to go on without reading anew what comes before; None where a number says it all."""
        return None

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.rows)))
        random.Random(self.seed + 1_000_003 * epoch).shuffle(order)
        return order


class ShareOfDocuments(DocumentOrder):
    """One share of the documents, in such an order.

    A streamed data set is read in chunks of `shuffle_buffer` documents, each shuffled, so that its position is the chunk's,
    as `datasets` knows it, and a number within.

    Files are divided among the shares where their number allows; else each share passes over the documents of the others,
    which is reading without tokenizing.

    Args:
        share: of the documents.
        state: from :meth:`state` of an earlier order, for its epoch; None begins at the epoch's first document.
    """

    def __init__(
        self, rows: Documents, seed: int, shuffle_buffer: int, share: Share, state: dict[str, Any] | None = None
    ):
        super().__init__(rows, seed, shuffle_buffer)
        self.share, self._chunk, self._goes_on_from = share, state, state

    def texts(self, epoch: int, document: int) -> Iterator[str]:
        if isinstance(self.rows, datasets.IterableDataset):
            start, self._goes_on_from = self._goes_on_from, None
            return self._chunks(epoch, document, start if start is not None and start["epoch"] == epoch else None)
        own = self._order(epoch)[self.share.index :: self.share.count]
        return (self.rows[index]["text"] for index in own[document:])

    def state(self) -> dict[str, Any] | None:
        return self._chunk

    def _chunks(self, epoch: int, document: int, start: dict[str, Any] | None) -> Iterator[str]:
        rows = split_dataset_by_node(self.rows, self.share.index, self.share.count)
        first = 0  # number of the chunk's first document
        if start is not None:
            rows.load_state_dict(start["rows"])
            first = start["first"]
        texts = texts_in(rows)
        while True:
            self._chunk = {"epoch": epoch, "first": first, "rows": rows.state_dict()}
            chunk = list(itertools.islice(texts, self.shuffle_buffer))
            if not chunk:
                return
            random.Random(f"{self.seed}/{epoch}/{self.share.index}/{first}").shuffle(chunk)
            yield from chunk[max(0, document - first) :]
            first += len(chunk)
