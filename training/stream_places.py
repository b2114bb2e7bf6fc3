"""Where the training text continues, for every process and every worker that reads it."""

from accelerate.utils import broadcast_object_list, gather_object

from dynakv.dataset_config import DOCUMENTS
from dynakv.training_config import TrainConfig
from lowrank_kv.utils.errors import UserError

from .data import Batch, Place
from .engine import Engine


class StreamPlaces:
    """The places of a run's readers.

    Where the stream is divided by documents, each worker of each process has one of its own; by blocks all read the same
    stream, and the last process reads the last block of a step.

    Args:
        saved: of an earlier start, for each process the places of its workers; None at the beginning.

    Raises:
        UserError: `saved` is of another number of processes or workers, and these had documents of their own.
    """

    def __init__(self, engine: Engine, saved: list[list[Place | None]] | None):
        self.engine = engine
        self.has_own_documents = engine.config.dataset.divided_by == DOCUMENTS
        count = readers_of(engine.config)
        if saved is not None and self.has_own_documents and (len(saved), len(saved[0])) != (engine.world, count):
            raise UserError(
                f"--resume needs as many processes and workers as before, since each has documents of its own: the run had "
                f"{len(saved)} processes × {len(saved[0])} readers, and now it is {engine.world} × {count} "
                f"(`dataset.workers`); start it so, or begin with `dataset.divided_by: blocks`"
            )
        index = engine.accelerator.process_index if self.has_own_documents else 0
        self._own: list[Place | None] = [None] * count if saved is None else list(saved[index])
        self.saved = saved

    @property
    def own(self) -> list[Place | None] | None:
        """Of this process's readers; None at the beginning."""
        return None if self.saved is None else self._own

    def note(self, batches: list[Batch], first: int) -> None:
        """Note the batches of a step, of which the first is this process's batch number `first`."""
        for number, batch in enumerate(batches, first):
            self._own[number % len(self._own)] = batch.place

    def rounds(self) -> list[int]:
        """How often this process's readers have begun each data set; 0 before their first block."""
        return self._rounds_of(self._own)

    def rounds_of_all(self) -> list[int]:
        """The same of all processes' readers, as :meth:`gather` found them."""
        return self._rounds_of([place for places in self.saved or () for place in places])

    def _rounds_of(self, read: list[Place | None]) -> list[int]:
        places = [place for place in read if place is not None]
        epochs = zip(*([epoch + 1 for epoch, _, _ in place["cursors"]] for place in places), strict=True)
        return [max(each) for each in epochs] if places else [0] * len(self.engine.config.dataset.name)

    def gather(self) -> list[list[Place | None]]:
        """Of all processes, ready for JSON; every process must call this."""
        if self.has_own_documents:
            self.saved = gather_object([list(self._own)])
        else:
            last = [list(self._own)]
            broadcast_object_list(last, from_process=self.engine.world - 1)
            self.saved = last
        return self.saved


def readers_of(config: TrainConfig) -> int:
    """V, how many of each process read documents of their own."""
    return max(1, config.dataset.workers) if config.dataset.divided_by == DOCUMENTS else 1
