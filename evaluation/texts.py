"""Texts to measure on, as windows of tokens.

Shapes: N windows, T tokens of a window, X tokens of a text.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowrank_kv.utils.config import configuration, option, require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import files_of
from lowrank_kv.utils.text_data import (
    STREAMING_HELP,
    Blocks,
    Documents,
    check_of_hub,
    document_blocks,
    hold_out,
    load_documents,
)

from .run_setup import MeasuredText


@configuration
class TextConfig:
    """One text to measure on."""

    label: str = option(help="name of the text in the results")
    name: str = option(help="hub id or local file")
    subset: str | None = option(None, help="configuration name of a hub data set")
    split: str = option("test", help="split of a hub data set")
    text_field: str = option("text", help="column that holds the text")
    streaming: bool = option(False, help=STREAMING_HELP)
    heldout_share: float = option(
        0.0,
        help="measure only the documents that training with this `dataset.heldout_share` leaves out; 0 measures all",
    )
    optional: bool = option(False, help="leave the text out, with a notice, where the local file does not exist")

    def __post_init__(self):
        require(0 <= self.heldout_share <= 1, "heldout_share", self.heldout_share, "between 0 and 1")


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of one text; no token is in two of them.

    The first ones of any number are spread over all of the text, so that a run that is ended has read something of its end.

    Attributes:
        ids_NT: token ids, int64.
        documents: the one that most of each window's tokens are of, counted in the order of the text.
        touched: how many documents each window holds tokens of; more than one where it runs over a document's end.
    """

    ids_NT: Tensor
    documents: Sequence[int]
    touched: Sequence[int]

    def __len__(self) -> int:
        return len(self.ids_NT)

    @classmethod
    def of_blocks(cls, blocks: Blocks) -> "Windows":
        order, documents, touched = _spread(len(blocks.ids_NT)), blocks.documents, blocks.touched
        return cls(blocks.ids_NT[order], [documents[number] for number in order], [touched[number] for number in order])


def _spread(count: int) -> list[int]:
    """0 … `count` − 1, ordered by their binary digits in reverse (van der Corput's sequence)."""
    digits = (count - 1).bit_length()
    return sorted(range(count), key=lambda number: f"{number:0{digits}b}"[::-1])


def documents_told(texts: Mapping[str, Windows]) -> dict[str, dict[str, list[int]]]:
    """What a record says of each text's documents, window by window."""
    return {label: {"of": list(each.documents), "touched": list(each.touched)} for label, each in texts.items()}


def measured_texts(texts: Sequence[TextConfig]) -> list[MeasuredText]:
    """Which of their documents are measured."""
    return [MeasuredText(text.name, text.heldout_share, text.split) for text in texts]


def check_texts(texts: list[TextConfig]) -> None:
    """Raise :class:`UserError` unless there are texts, each under a label of its own."""
    require(bool(texts), "texts", texts, "at least one text")
    labels = [text.label for text in texts]
    require(len(set(labels)) == len(labels), "texts", labels, "of different labels")


def read_texts(
    texts: list[TextConfig],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    count: int,
    *,
    read: int | None = None,
    key: str = "length",
) -> dict[str, Windows]:
    """Label of each text that is there → `count` windows of `length` tokens.

    Args:
        read: the windows are spread evenly over this many of a text's first tokens, which may be of one document; None
            spreads them over all of its documents.
        key: what a user calls `length`, for errors.

    Raises:
        UserError: no text is there, or one is too short.
    """
    there = [text for text in texts if _is_there(text)]
    if not there:
        missing = ", ".join(text.name for text in texts)
        raise UserError(
            f"none of the texts is there: {missing}; put one of these files there, or give others as `texts`"
        )
    found = {}
    for text in there:
        if read is None:
            windows = document_blocks(_documents(text), tokenizer, length, count, key=key)
        else:
            first = document_blocks(_documents(text), tokenizer, read, 1, key="read")
            windows = Blocks(*(windows_of(each_1X[0], length, count) for each_1X in first))
        found[text.label] = Windows.of_blocks(windows)
    return found


def windows_of(ids_X: Tensor, length: int, count: int) -> Tensor:
    """`count` windows of `length` tokens, spread evenly over a text and not overlapping, (N, T); fewer if it is short."""
    count = min(count, len(ids_X) // length)
    stride = (len(ids_X) - length) // max(count - 1, 1)
    return torch.stack([ids_X[i * stride : i * stride + length] for i in range(count)])


def _documents(text: TextConfig) -> Documents:
    for key in ("subset", "split"):
        check_of_hub(f"texts.{key}", getattr(text, key), [text.name], default="test")
    rows = load_documents(
        text.name, subset=text.subset, split=text.split, text_field=text.text_field, streaming=text.streaming
    )
    if not text.heldout_share:
        return rows
    held = hold_out(rows, text.heldout_share)[1]
    if next(iter(held), None) is None:
        raise UserError(
            f"`heldout_share` {text.heldout_share} holds out no document of `{text.name}`; raise it, here and in training"
        )
    return held


def _is_there(text: TextConfig) -> bool:
    if text.optional and not files_of(text.name):
        print(f"leaving out `{text.label}`: {text.name} is not there")
        return False
    return True
