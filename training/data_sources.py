"""The texts that a configuration names: the training stream and the held-out blocks."""

import os
import warnings
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dynakv.dataset_config import DOCUMENTS, DatasetConfig, entry_for
from dynakv.training_config import TrainConfig
from lowrank_kv.calibration.known_text import KnownText, is_named, may_overlap
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import files_of
from lowrank_kv.utils.text_data import Documents, check_of_hub, document_blocks, hold_out, is_hub_id, load_documents

from .data import Batch, TrainingBlocks


def training_stream(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> TrainingBlocks:
    """The global stream of training blocks, without the documents that are held out."""
    dataset = config.dataset
    for key in ("subset", "split"):
        check_of_hub(f"dataset.{key}", getattr(dataset, key), dataset.name)
    sources = [_training_documents(dataset, index) for index in range(len(dataset.name))]
    if dataset.heldout_share:
        sources = [hold_out(rows, dataset.heldout_share)[0] for rows in sources]
    return TrainingBlocks(
        sources,
        dataset.weights or [1.0] * len(sources),
        tokenizer,
        dataset.sequence_length,
        seed=config.seed,
        isolate=dataset.isolate_documents,
        shuffle_buffer=dataset.shuffle_buffer,
        by_documents=dataset.divided_by == DOCUMENTS,
    )


def heldout_blocks(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Batch]]:
    """Name of each held-out text → its blocks, with documents isolated as in training.

    The texts are the data sets of `dataset.heldout` and, with `dataset.heldout_share`, the held-out documents of each
    training data set.
    """
    dataset, count = config.dataset, config.heldout_blocks
    if not count:
        return {}
    if dataset.heldout:
        check_of_hub("dataset.heldout_subset", dataset.heldout_subset, dataset.heldout)
        check_of_hub("dataset.heldout_split", dataset.heldout_split, dataset.heldout, default="test")
    documents: dict[str, Documents] = {}
    for label, name in zip(labels_of(dataset.heldout or []), dataset.heldout or [], strict=True):
        documents[label] = load_documents(
            name,
            subset=dataset.heldout_subset,
            split=dataset.heldout_split,
            text_field=dataset.heldout_text_field,
            streaming=dataset.streaming,
            key="dataset.heldout",
        )
    if dataset.heldout_share:
        for index, label in enumerate(labels_of(dataset.name)):
            rows = _training_documents(dataset, index)
            documents[f"{label} (held-out share)"] = hold_out(rows, dataset.heldout_share)[1]
    return {name: _heldout_batches(name, rows, tokenizer, dataset, count) for name, rows in documents.items()}


def warn_of_heldout_text(config: TrainConfig, texts_read: list[dict[str, Any]]) -> None:
    """Warn where documents that a run holds out can be among those that it trains on, or that its bases or its checkpoint
    have read.

    Args:
        texts_read: of the run (:func:`training.texts_read.texts_of_run`), its own first.
    """
    dataset = config.dataset
    for name in dataset.heldout or []:
        if _is_trained_on(dataset, name):
            warnings.warn(
                f"`dataset.heldout` has {name}, which `dataset.name` trains on: what is measured on it says nothing of "
                f"unseen text; name another, or give `dataset.heldout_share`, which holds documents of it out",
                stacklevel=2,
            )
    for record in texts_read[len(dataset.name) :]:  # the run's own are known by more than their names
        known = KnownText(**_reader_of(config), record=record)
        if dataset.heldout_share:
            for name in dataset.name:
                known.warn_of(name, share=dataset.heldout_share, use="holds out")
        for name in dataset.heldout or []:
            known.warn_of(name, share=0.0, split=dataset.heldout_split, use="holds out")


def _is_trained_on(dataset: DatasetConfig, name: str) -> bool:
    """Whether documents of a held-out data set can be among those that are trained on."""
    has_splits, files = is_hub_id(name) or Path(name).is_dir(), _identities(name)
    for index, own in enumerate(dataset.name):
        own_files = _identities(own)
        has_files = files or own_files
        is_same = bool(files & own_files) if has_files else is_named(name, own) or is_named(own, name)
        if is_same and (not has_splits or may_overlap(entry_for(dataset.split, index), dataset.heldout_split)):
            return True
    return False


def _identities(name: str) -> set[tuple[int, int]]:
    """What tells the files of a name or a pattern apart, whatever leads to them."""
    found = (os.stat(file) for file in files_of(name))
    return {(each.st_dev, each.st_ino) for each in found}


def _reader_of(config: TrainConfig) -> dict[str, str]:
    """What a run began from, as warnings of its texts have it; a resumed run need not be told it again."""
    if config.calibration.bases is not None:
        bases = f"the calibration `{config.calibration.bases}`"
        return {"reader": bases, "make": "calibrate", "share_option": "--heldout_share"}
    given = config.initial_checkpoint
    start = f"the checkpoint `{given}`" if given else "the bases or the checkpoint that this run began from"
    return {"reader": start, "make": "train", "share_option": "--dataset.heldout_share"}


def _heldout_batches(
    name: str, rows: Documents, tokenizer: PreTrainedTokenizerBase, dataset: DatasetConfig, count: int
) -> list[Batch]:
    try:
        blocks = document_blocks(rows, tokenizer, dataset.sequence_length, count, key="dataset.sequence_length")
    except UserError as error:
        raise UserError(
            f"cannot measure on {name}: {error}, raise `dataset.heldout_share`, or leave it out (`heldout_blocks: 0`)"
        ) from error
    return Batch.of_each(blocks, isolate=dataset.isolate_documents)


def labels_of(names: list[str]) -> list[str]:
    """Of each name as many last components as tell it from the others; repeated names are numbered."""
    parts = [Path(name).parts for name in names]
    labels = []
    for own in parts:
        others = {each for each in parts if each != own}
        least = next(
            (count for count in range(1, len(own)) if all(each[-count:] != own[-count:] for each in others)), len(own)
        )
        labels.append(str(Path(*own[-least:])))
    return [f"{label} #{i + 1}" if labels.count(label) > 1 else label for i, label in enumerate(labels)]


def _training_documents(dataset: DatasetConfig, index: int) -> Documents:
    return load_documents(
        dataset.name[index],
        subset=entry_for(dataset.subset, index),
        split=entry_for(dataset.split, index),
        text_field=entry_for(dataset.text_field, index),
        streaming=dataset.streaming,
    )
