"""Text for calibration, training and evaluation: documents in, blocks of tokens out.

Shapes: N blocks, T tokens of a block, X tokens of a text.
"""

import bisect
import contextlib
import functools
import glob
import hashlib
import itertools
import lzma
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowrank_kv.utils.config import configuration, option, require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import files_of, name_of

_FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_PACKED = (".gz", ".zst", ".xz")

# A text of so many characters, and so many times what is wanted of it, is not tokenized whole to pick a few blocks.
_TOKENIZED_WHOLE, _TIMES_NEEDED = 30_000_000, 50

NAME_HELP = (
    "hub ids, or .txt (one document), .json, .jsonl or .parquet files (also .gz, .zst, .xz), comma-separated; equal shares "
    "of each"
)
STREAMING_HELP = (
    "read only the first documents, without a local copy of the text, rather than blocks spread over all of it"
)

# Imported by what reads: measuring on random tokens needs no `datasets`.
if TYPE_CHECKING:
    import datasets

Documents: TypeAlias = "datasets.Dataset | datasets.IterableDataset"


def load_documents(
    name: str, *, subset: str | None, split: str, text_field: str, streaming: bool = False, key: str = "name"
) -> Documents:
    """One data set, a row per document, its text in the column ``text``.

    Args:
        name: a hub id, or a .txt (one document), .json, .jsonl or .parquet file, also packed as .gz, .zst or .xz. A file
            may be a pattern (``texts/*.jsonl.gz``) and lie elsewhere (``hf://datasets/…``, ``https://…``).
        subset: the hub data set's configuration name, if it has several.
        split: of a hub data set, e.g. ``train`` or ``train[:1%]``.
        text_field: the column that holds the text.
        streaming: read while iterating, without a local copy; the result then has no length.
        key: what names it, for errors.

    Raises:
        UserError: no name, nothing there, no such column, or no text in it.
    """
    import datasets

    if not name.strip():
        raise UserError(f"`{key}` of a data set is {name!r}; name a file or a hub id, or leave out the comma too many")
    name = os.path.expanduser(name)
    format = _format(name)
    if format is None and Path(name).is_file():
        raise UserError(
            f"the data file `{name}` is of no known kind; give it its own of the endings {', '.join(_FORMATS)}, "
            f"or one of these and {', '.join(_PACKED)}"
        )
    remedy = "mend the file" if format is not None else "give `subset` where it has several"
    with _readable(f"load the data set `{name}`", remedy):
        if format is None:
            rows = datasets.load_dataset(name, subset, split=split, streaming=streaming)
        else:
            if "://" not in name and not files_of(name):
                raise UserError(f"the data file `{name}` does not exist; check `{key}`")
            options = {"sample_by": "document"} if format == "text" else {}
            files = glob.escape(name) if Path(name).exists() else name
            try:
                rows = datasets.load_dataset(format, data_files=files, split="train", streaming=streaming, **options)
            except StopIteration:  # how datasets ends on an empty file of JSON
                raise UserError(f"the data set `{name}` is empty: it has no rows") from None
        first = next(iter(rows), None)
        if first is not None:
            _check_column(first, text_field, name)
            has_text = functools.partial(_has_text, name=name, column=text_field)
            rows = rows.select_columns([text_field]).filter(has_text, input_columns=text_field, with_indices=True)
            first = next(iter(rows), None)
    if first is None:
        raise UserError(f"the data set `{name}` is empty: no row has text in `{text_field}`")
    rows.info.description = f"the data set `{name}`"  # for errors of what is read later
    return rows.rename_column(text_field, "text") if text_field != "text" else rows


def texts_in(rows: Documents) -> Iterator[str]:
    """The documents' texts, in order.

    Raises:
        UserError: a file that is read while iterating (`streaming`) is damaged.
    """
    with _readable(f"read {rows.info.description}", "mend the file, or start again where a connection broke"):
        # In a data loader's worker, plain iteration would give each worker other files; `iter` gives all.
        for batch in rows.iter(batch_size=1):
            yield from batch["text"]


@contextlib.contextmanager
def _readable(what: str, remedy: str) -> Iterator[None]:
    """Turn what a damaged file or a missing data set raises into a :class:`UserError`."""
    import datasets
    import zstandard

    of_packed = (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, *of_packed, datasets.exceptions.DatasetGenerationError) as error:
        # What went wrong is said by what datasets' own exception came from.
        why = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise UserError(f"cannot {what}: {' '.join(why.split())[:300]}; {remedy}") from error


def _check_column(row: Mapping[str, Any], column: str, name: str) -> None:
    if column not in row:
        raise UserError(f"the data set `{name}` has no column `{column}`, only {', '.join(row)}; set `text_field`")
    if not isinstance(row[column], str | None):
        kind = type(row[column]).__name__
        raise UserError(f"column `{column}` of the data set `{name}` holds {kind}, not text; set `text_field`")


def is_hub_id(name: str) -> bool:
    """Whether a data set's name is none of a file, of a pattern or of an address."""
    return _format(name) is None and "://" not in name and not files_of(name)


def check_of_hub(key: str, given: str | Sequence[str] | None, names: Sequence[str], *, default: str = "train") -> None:
    """Raise :class:`UserError` where a setting of hub data sets is given and none of the names is one's.

    Args:
        key, given: what it is called, and its value or values.
        default: what stands there where nothing is given. `train`, as files are called once they are loaded, may, too.
    """
    values = [given] if given is None or isinstance(given, str) else given
    is_used = set(values) <= {None, default, "train"} or any(map(is_hub_id, names))
    require(is_used, key, given, f"left out of files ({', '.join(names)}), where it changes nothing")


def _format(name: str) -> str | None:
    """The loader of a file name; None for a hub id."""
    path = Path(name)
    if path.suffix in _PACKED:
        path = path.with_suffix("")
        # A bare .gz has always been read as .jsonl.gz.
        return _FORMATS.get(path.suffix, "json")
    return _FORMATS.get(path.suffix)


def _has_text(text: str | None, index: int, *, name: str, column: str) -> bool:
    if not isinstance(text, str | None):
        kind = type(text).__name__
        raise UserError(
            f"column `{column}` of the data set `{name}` holds {kind} in row {index + 1}, not text; mend the row"
        )
    return bool(text and text.strip())


def hold_out(rows: Documents, share: float) -> tuple[Documents, Documents]:
    """(documents to train on, documents held out), split by a hash of each document's text.

    A document is on the same side in every run, process and order, and so are its duplicates.

    Args:
        share: of the documents to hold out, in [0, 1].
    """
    return (
        rows.filter(functools.partial(_hashes_above, share=share), input_columns="text"),
        rows.filter(functools.partial(_hashes_below, share=share), input_columns="text"),
    )


def _hashes_below(text: str, share: float) -> bool:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _hashes_above(text: str, share: float) -> bool:
    return not _hashes_below(text, share)


@configuration
class CalibrationText:
    """What bases are calibrated on."""

    name: list[str] = option(["Salesforce/wikitext"], help=NAME_HELP)
    subset: str | None = option(None, help="configuration name of a hub data set")
    split: str = option("train", help="split of a hub data set")
    text_field: str = option("text", help="column that holds the text")
    streaming: bool = option(False, help=STREAMING_HELP)
    heldout_share: float = option(
        0.0, help="leave out the documents that training with this `dataset.heldout_share` leaves out"
    )
    tokens: int = option(8192, help="the most that is read, in full blocks of every text", unit="tokens")
    length: int = option(
        1024, help="length of a block; less where `tokens` has no room for one of every text", unit="tokens"
    )

    def __post_init__(self):
        require(bool(self.name), "name", self.name, "at least one text")
        require(0 <= self.heldout_share < 1, "heldout_share", self.heldout_share, "at least 0 and below 1")
        require(self.tokens >= 1, "tokens", self.tokens, "at least 1")
        texts = len(self.name)
        require(self.tokens >= texts, "tokens", self.tokens, f"at least {texts}, one of every text in `name`")
        require(self.length >= 1, "length", self.length, "at least 1")

    def record(self) -> dict[str, Any]:
        """What is read, by its names, as a calibration records it."""
        named = {key: getattr(self, key) for key in ("subset", "split", "text_field", "heldout_share")}
        return {"text": [name_of(name) for name in self.name], **named, "length": self.block_length}

    @property
    def block_length(self) -> int:
        """Tokens of a block: `length`, or less, so that `tokens` has room for one of every text."""
        return min(self.length, self.tokens // len(self.name))

    def blocks(self, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """The token ids, (count, T) int64."""
        return self.read(tokenizer).ids_NT

    def read(self, tokenizer: PreTrainedTokenizerBase) -> "Blocks":
        """The blocks; documents are counted through all texts."""
        length = self.block_length
        count = self.tokens // len(self.name) // length
        for key in ("subset", "split"):
            check_of_hub(key, getattr(self, key), self.name)

        def of(name: str) -> Blocks:
            rows = load_documents(
                name, subset=self.subset, split=self.split, text_field=self.text_field, streaming=self.streaming
            )
            if self.heldout_share:
                rows = hold_out(rows, self.heldout_share)[0]
            return document_blocks(rows, tokenizer, length, count)

        found, before = [of(name) for name in self.name], 0
        for i, each in enumerate(found):
            found[i] = each._replace(document_NT=each.document_NT + before)
            before += int(each.document_NT.max()) + 1
        return Blocks(*map(torch.cat, zip(*found, strict=True)))


def tokens_of(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids of a document, as a prompt begins (with the tokenizer's own first token, if it adds one), ended by its
    end-of-text token."""
    # Documents are cut into blocks afterwards, so the tokenizer's warning about their length means nothing here.
    ids = tokenizer(text, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


class Blocks(NamedTuple):
    """Blocks of a text.

    Attributes:
        ids_NT: token ids, int64.
        starts_NT: where documents start, bool.
        document_NT: which document each token is of, int64, counted in the order of reading.
    """

    ids_NT: Tensor
    starts_NT: Tensor
    document_NT: Tensor

    @property
    def documents(self) -> list[int]:
        """The one that most of each block's tokens are of."""
        counts = [document_T.unique(return_counts=True) for document_T in self.document_NT]
        return [int(found[count.argmax()]) for found, count in counts]

    @property
    def touched(self) -> list[int]:
        """How many documents each block holds tokens of; more than one where it runs over a document's end."""
        return [len(document_T.unique()) for document_T in self.document_NT]


def blocks(rows: Documents, tokenizer: PreTrainedTokenizerBase, length: int, count: int) -> Tensor:
    """Only the token ids of :func:`document_blocks`."""
    return document_blocks(rows, tokenizer, length, count).ids_NT


def document_blocks(
    rows: Documents, tokenizer: PreTrainedTokenizerBase, length: int, count: int, *, key: str = "length"
) -> Blocks:
    """`count` blocks, or as many as there are; no token is in two of them.

    They lie at even distances through all documents, so that a few blocks represent all of the text, whatever the order of
    its documents; of documents that are streamed they are the first. Of long texts only the documents around the blocks are
    tokenized, and each block begins a document.

    Args:
        key: what a user calls `length`, for errors.

    Raises:
        UserError: the text has not one block.
    """
    from datasets import IterableDataset

    if not isinstance(rows, IterableDataset):
        ends = list(itertools.accumulate(len(text) for batch in rows.iter(1000) for text in batch["text"]))
        if ends and ends[-1] > max(_TOKENIZED_WHOLE, _TIMES_NEEDED * count * length):
            sampled = _sampled_blocks(rows, tokenizer, length, count, ends)
            if len(sampled.ids_NT) == count:  # else it is of a few long documents, which have more blocks than one each
                return sampled
    limit = count * length if isinstance(rows, IterableDataset) else None
    ids: list[int] = []
    starts: list[int] = []
    for text in texts_in(rows):
        starts.append(len(ids))
        ids += tokens_of(text, tokenizer)
        if limit is not None and len(ids) >= limit:
            ids = ids[:limit]
            break
    usable = len(ids) // length
    if not usable:
        raise UserError(
            f"the text has {len(ids)} tokens, too few for one block of {length}; give more text, or ask for shorter blocks "
            f"by `{key}`"
        )
    picked = torch.linspace(0, usable - 1, min(count, usable)).round().long()
    return Blocks(*(of[picked] for of in _cut(ids, starts, length)))


def _sampled_blocks(
    rows: "datasets.Dataset", tokenizer: PreTrainedTokenizerBase, length: int, count: int, ends: list[int]
) -> Blocks:
    """The same of a long text, whose documents end at the characters `ends`: from even distances through it, each block is
    the next one that has not been read."""
    ids: list[int] = []
    starts: list[int] = []
    following = 0
    for part in range(count):
        document = max(following, bisect.bisect_left(ends, part * ends[-1] // count))
        wanted = len(ids) + length
        while len(ids) < wanted and document < len(ends):
            starts.append(len(ids))
            ids += tokens_of(rows[document]["text"], tokenizer)
            document += 1
        following, ids = document, ids[:wanted]
    return _cut(ids, starts, length)


def _cut(ids: list[int], starts: list[int], length: int) -> Blocks:
    """All full blocks of a text, whose documents start at `starts`."""
    usable = len(ids) // length
    is_start_X = torch.zeros(len(ids), dtype=torch.bool)
    is_start_X[[start for start in starts if start < len(ids)]] = True  # a last document may have no token
    document_X = is_start_X.long().cumsum(0) - 1
    return Blocks(*(of[: usable * length].view(usable, length) for of in (torch.tensor(ids), is_start_X, document_X)))


def labelled_block(argument: str, tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[str, Tensor]:
    """A command line's ``LABEL=FILE`` as the label and the first block of the file, (T,) int64."""
    label, equals, name = argument.partition("=")
    if not equals:
        raise UserError(f"`--text` must be LABEL=FILE, got {argument!r}")
    documents = load_documents(name, subset=None, split="test", text_field="text")
    return label, blocks(documents, tokenizer, length, 1)[0]
