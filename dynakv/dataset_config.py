"""The keys of a training run that say what text it reads."""

import math
from collections.abc import Sequence
from typing import Any

from lowrank_kv.utils.config import configuration, option, require
from lowrank_kv.utils.paths import name_of

BLOCKS, DOCUMENTS = DIVISIONS = ("blocks", "documents")


@configuration
class DatasetConfig:
    """What text the compressor learns from."""

    name: list[str] = option(
        help="hub ids or .txt/.json/.jsonl/.parquet files (also .gz, .zst, .xz; patterns; hf:// and https://), mixed; "
        "comma-separated. A row is a document, a .txt is one",
    )
    subset: list[str | None] | None = option(
        None,
        help="configuration name of hub data sets, e.g. sample-10BT; one for all or one for each name, null for one that "
        "needs none",
    )
    split: list[str] = option(["train"], help="split of hub data sets; one for all or one for each name")
    text_field: list[str] = option(["text"], help="column that holds the text; one for all or one for each name")
    weights: list[float] | None = option(None, help="how often each data set is drawn, e.g. 2,1; equal by default")
    streaming: bool = option(
        False,
        help="read while training instead of making a local copy first; shuffles within `shuffle_buffer`, and of held-out "
        "data sets the first documents are measured",
    )
    shuffle_buffer: int = option(10_000, help="what streamed data sets are shuffled among", unit="documents")
    workers: int = option(0, help="processes that read beside each process of training")
    divided_by: str = option(
        BLOCKS,
        help="`blocks`: the same blocks for any number of processes and workers, each of which tokenizes all text; "
        "`documents`: each reads and tokenizes documents of its own, for runs of many processes, and a run goes on only "
        "with as many of them",
        choices=DIVISIONS,
    )
    isolate_documents: bool = option(
        True,
        help="no token attends to another document of its block, positions restart with each, and no document's first "
        "token is predicted from the one before",
    )
    heldout: list[str] | None = option(
        None, help="data sets never trained on, for the held-out rate and perplexity; none by default"
    )
    heldout_subset: str | None = option(None, help="configuration name of held-out hub data sets")
    heldout_split: str = option("test", help="split of a held-out hub data set")
    heldout_text_field: str = option("text", help="column of the held-out data sets that holds the text")
    heldout_share: float = option(
        0.0,
        help="share of each data set's documents, picked by a hash of their text, held out of training and measured",
    )
    sequence_length: int = option(1024, help="length of a training sequence", unit="tokens")

    def __post_init__(self):
        require(len(self.name) > 0, "name", self.name, "at least one data set")
        require(self.sequence_length >= 2, "sequence_length", self.sequence_length, "at least 2 tokens")
        for key in ("subset", "split", "text_field"):
            values = getattr(self, key)
            if values is not None:
                require(len(values) in (1, len(self.name)), key, values, "one for all or one for each name")
        if self.weights is not None:
            require(len(self.weights) == len(self.name), "weights", self.weights, "one number for each name")
            is_drawn_by = min(self.weights) > 0 and math.isfinite(sum(self.weights))
            require(is_drawn_by, "weights", self.weights, "positive numbers, of a finite sum")
        require(self.shuffle_buffer >= 1, "shuffle_buffer", self.shuffle_buffer, "at least 1")
        require(self.workers >= 0, "workers", self.workers, "zero or positive")
        require(0 <= self.heldout_share < 1, "heldout_share", self.heldout_share, "at least 0 and below 1")

    def records(self) -> list[dict[str, Any]]:
        """What training reads, as :attr:`lowrank_kv.calibration.known_text.KnownText.record` says it, of each data set."""
        return [
            {"text": [name_of(name)], "split": entry_for(self.split, index), "heldout_share": self.heldout_share}
            for index, name in enumerate(self.name)
        ]


def entry_for(values: Sequence[str | None] | None, index: int) -> str | None:
    """The entry for one data set of a list that has one for all or one for each."""
    return None if values is None else values[index if len(values) > 1 else 0]
