"""A user's mistake that a worker of a data loader meets, raised where the run is: torch would wrap it with its traceback."""

from collections.abc import Iterable, Iterator

from torch.utils.data import IterableDataset

from lowrank_kv.utils.errors import UserError

from .data import Batch


class WithErrors(IterableDataset):
    """The batches of a stream, and behind them the error that ended it."""

    def __init__(self, stream: IterableDataset):
        self._stream = stream

    def __iter__(self) -> Iterator[Batch | UserError]:
        try:
            yield from self._stream
        except UserError as error:
            yield error


def without_errors(batches: Iterable[Batch | UserError]) -> Iterator[Batch]:
    """The batches; raises an error that stands among them."""
    for batch in batches:
        if isinstance(batch, UserError):
            raise batch
        yield batch
