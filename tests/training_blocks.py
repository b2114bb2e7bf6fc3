"""What tests of the stream of training blocks share."""

import itertools
from collections.abc import Iterable
from os import PathLike

from lowrank_kv.utils.text_data import load_documents
from training.data import Batch

LENGTH = 48


def load(path: str | PathLike, **options):
    """The rows of text files whose texts stand in the field `text`."""
    return load_documents(str(path), **{"subset": None, "split": "train", "text_field": "text", **options})


def first_batches(stream: Iterable[Batch], count: int) -> list[Batch]:
    return list(itertools.islice(stream, count))
