"""The stream of training blocks.

Shapes: T tokens of a block.
"""

import copy
import itertools
import random
from collections.abc import Iterator

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowrank.text import token_stream


class TrainingBlocks(torch.utils.data.IterableDataset):
    """An endless, deterministic stream of packed blocks, mixed from several data sets.

    Every data set is read document by document in a shuffled order, anew each epoch, and cut into blocks; which data set
    gives the next block is drawn by weight. The order depends on the seed alone; :meth:`part` gives process `rank` of
    `world` every `world`-th block, so that the same global batch is seen whatever the number of processes.

    Args:
        sources: documents of each data set.
        weights: how often each is drawn, any positive numbers.
        tokenizer, length: blocks of `length` tokens.
        seed: of order and mixture.
    """

    def __init__(
        self,
        sources: list[datasets.Dataset],
        weights: list[float],
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        *,
        seed: int,
    ):
        self.sources, self.weights, self.tokenizer, self.length = sources, weights, tokenizer, length
        self.seed, self.rank, self.world, self.skip = seed, 0, 1, 0

    def part(self, *, rank: int = 0, world: int = 1, skip: int = 0) -> "TrainingBlocks":
        """The same global stream seen by one process, or from a later block on."""
        twin = copy.copy(self)
        twin.rank, twin.world, twin.skip = rank, world, skip
        return twin

    def first(self, count: int) -> Tensor:
        """The first `count` blocks, (count, T) int64."""
        return torch.stack(list(itertools.islice(self, count)))

    def __iter__(self) -> Iterator[Tensor]:
        picker = random.Random(self.seed)
        streams = [self._endless(source, self.seed + 1 + i) for i, source in enumerate(self.sources)]
        for number in itertools.count():
            [stream] = picker.choices(streams, self.weights)
            block = list(itertools.islice(stream, self.length))
            if number >= self.skip and number % self.world == self.rank:
                yield torch.tensor(block)

    def _endless(self, rows: datasets.Dataset, seed: int) -> Iterator[int]:
        shuffler = random.Random(seed)
        while True:
            order = list(range(len(rows)))
            shuffler.shuffle(order)
            yield from token_stream(rows, self.tokenizer, order)
