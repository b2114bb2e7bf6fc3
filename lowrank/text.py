"""Text for calibration, training and evaluation: documents in, blocks of tokens out.

Shapes: T tokens of a block.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowrank.config import option, require
from lowrank.errors import UserError

_LOCAL_FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".gz": "json", ".parquet": "parquet"}


def load_documents(name: str, *, subset: str | None, split: str, text_field: str) -> datasets.Dataset:
    """One data set, a row per document.

    Args:
        name: a hub id, or a local .txt (one document), .jsonl, .jsonl.gz or .parquet file.
        subset: the hub data set's configuration name, if it has several.
        split: of a hub data set, e.g. ``train`` or ``train[:1%]``.
        text_field: the column that holds the text.

    Raises:
        UserError: nothing there, no such column, or no text in it.
    """
    path = Path(name)
    try:
        if path.suffix in _LOCAL_FORMATS:
            if not path.is_file():
                raise UserError(f"the data file `{name}` does not exist; check `dataset.name`")
            format = _LOCAL_FORMATS[path.suffix]
            options = {"sample_by": "document"} if format == "text" else {}
            rows = datasets.load_dataset(format, data_files=str(path), split="train", **options)
        else:
            rows = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot load the data set `{name}`: {' '.join(str(error).split())[:300]}") from error
    if text_field not in rows.column_names:
        raise UserError(
            f"the data set `{name}` has no column `{text_field}`, only {', '.join(rows.column_names)}; "
            f"set `dataset.text_field`"
        )
    rows = rows.select_columns([text_field]).filter(lambda text: bool(text and text.strip()), input_columns=text_field)
    if not len(rows):
        raise UserError(f"the data set `{name}` is empty: no row has text in `{text_field}`")
    return rows.rename_column(text_field, "text") if text_field != "text" else rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationText:
    """What bases are calibrated on."""

    name: list[str] = option(["Salesforce/wikitext"], help="hub ids or local files, equal shares of each")
    subset: str | None = option(None, help="configuration name of a hub data set")
    split: str = option("train", help="split of a hub data set")
    text_field: str = option("text", help="column that holds the text")
    tokens: int = option(8192, help="how much of it", unit="tokens")
    length: int = option(1024, help="length of a block", unit="tokens")

    def __post_init__(self):
        require(bool(self.name), "name", self.name, "at least one text")
        require(self.tokens >= 1, "tokens", self.tokens, "at least 1")
        require(self.length >= 1, "length", self.length, "at least 1")

    def blocks(self, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """The token ids, (count, T) int64."""
        length = min(self.length, self.tokens)
        count = max(1, self.tokens // (length * len(self.name)))

        def of(name: str) -> Tensor:
            rows = load_documents(name, subset=self.subset, split=self.split, text_field=self.text_field)
            return blocks(rows, tokenizer, length, count)

        return torch.cat([of(name) for name in self.name])


def token_stream(
    rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, order: list[int] | None = None
) -> Iterator[int]:
    """The tokens of all documents in turn, each ended by the tokenizer's end-of-text token."""
    end = tokenizer.eos_token_id
    for index in range(len(rows)) if order is None else order:
        # Documents are cut into blocks afterwards, so the tokenizer's warning about their length means nothing here.
        yield from tokenizer(rows[index]["text"], add_special_tokens=False, verbose=False)["input_ids"]
        if end is not None:
            yield end


def blocks(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, length: int, count: int) -> Tensor:
    """`count` blocks (or as many as there are) at even distances through all documents, (count, T) int64.

    Even distances make a few blocks stand for the whole text, whatever the order of its documents.
    """
    tokens = torch.tensor(list(token_stream(rows, tokenizer)))
    usable = len(tokens) // length
    if not usable:
        raise UserError(f"the text has {len(tokens)} tokens, too few for one block of {length}; use a shorter block")
    picked = torch.linspace(0, usable - 1, min(count, usable)).round().long()
    return tokens[: usable * length].view(usable, length)[picked]


def labelled_block(argument: str, tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[str, Tensor]:
    """A command line's ``LABEL=FILE`` as the label and the first block of the file, (T,) int64."""
    label, equals, name = argument.partition("=")
    if not equals:
        raise UserError(f"`--text` must be LABEL=FILE, got {argument!r}")
    documents = load_documents(name, subset=None, split="test", text_field="text")
    return label, blocks(documents, tokenizer, length, 1)[0]
