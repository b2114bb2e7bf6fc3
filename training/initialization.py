"""From a configuration to what the loop runs on: text, and compressors started from it."""

import functools
import math
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

import dynakv
from dynakv.checkpoint import read_config
from dynakv.initialization import Moments
from lowrank_kv.calibration.activation_moments import calibrate
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.calibration.gradient_moments import gradient_moments
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.text_data import Documents, document_blocks, hold_out, load_documents
from training.config import DatasetConfig, TrainConfig
from training.data import Batch, TrainingBlocks
from training.distillation import uncompressed
from training.engine import Engine

# α to begin with where nothing better is known; over a PCA the goal begins at what the open gates keep, and α follows it.
DEFAULT_PRICE = 4.0


def training_stream(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> TrainingBlocks:
    """The global stream of training blocks, without the documents that are held out."""
    dataset = config.dataset
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
    )


def heldout_blocks(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Batch]]:
    """Name of each held-out text → blocks of it, documents apart as in training.

    Those are the data sets of `dataset.heldout` and, with `dataset.heldout_share`, what is held out of each training one.
    """
    dataset, count = config.dataset, config.heldout_blocks
    if not count:
        return {}
    documents: dict[str, Documents] = {}
    for label, name in zip(_labels(dataset.heldout or []), dataset.heldout or [], strict=True):
        documents[label] = load_documents(
            name,
            subset=dataset.heldout_subset,
            split=dataset.heldout_split,
            text_field=dataset.heldout_text_field,
            streaming=dataset.streaming,
        )
    if dataset.heldout_share:
        for index, label in enumerate(_labels(dataset.name)):
            rows = _training_documents(dataset, index)
            documents[f"{label} (held-out share)"] = hold_out(rows, dataset.heldout_share)[1]
    return {name: _heldout_batches(name, rows, tokenizer, dataset, count) for name, rows in documents.items()}


def _heldout_batches(
    name: str, rows: Documents, tokenizer: PreTrainedTokenizerBase, dataset: DatasetConfig, count: int
) -> list[Batch]:
    try:
        ids_NT, starts_NT = document_blocks(rows, tokenizer, dataset.sequence_length, count)
    except UserError as error:
        raise UserError(
            f"cannot measure on {name}: {error}, raise `dataset.heldout_share`, or leave it out (`heldout_blocks: 0`)"
        ) from error
    return [
        Batch.of(ids_T[None], starts_T[None] if dataset.isolate_documents else None)
        for ids_T, starts_T in zip(ids_NT, starts_NT, strict=True)
    ]


def _labels(names: list[str]) -> list[str]:
    """The last part of each name, or the whole where others end alike; what is given twice is numbered."""
    short = [Path(name).name for name in names]
    whole = [name if short.count(last) > 1 else last for name, last in zip(names, short, strict=True)]
    return [f"{name} #{i + 1}" if whole.count(name) > 1 else name for i, name in enumerate(whole)]


def _training_documents(dataset: DatasetConfig, index: int) -> Documents:
    return load_documents(
        dataset.name[index],
        subset=_of(dataset.subset, index),
        split=_of(dataset.split, index),
        text_field=_of(dataset.text_field, index),
        streaming=dataset.streaming,
    )


def _of(values: list[str] | None, index: int) -> str | None:
    """The entry for one data set of a list that has one for all or one for each."""
    return None if values is None else values[index if len(values) > 1 else 0]


def given_price(config: TrainConfig) -> float | None:
    """α to begin with where it is known before the start: as it was asked for, or, where a run trains on from another and
    has a target, the other's last, which held its rate (unless it had no price: from zero no factor leads to one).

    Raises:
        UserError: `initial_checkpoint` is no checkpoint.
    """
    if config.rate.alpha is not None or config.initial_checkpoint is None:
        return config.rate.alpha
    last = read_config(config.initial_checkpoint).summary.get("alpha")
    return last if last and config.rate.target_retain_rate is not None else None


def initialise(engine: Engine, stream: TrainingBlocks) -> float | None:
    """Start a prepared engine's compressors from the leading training blocks or a calibration made before, or from an
    earlier run's, those of the first process on all.

    Returns:
        α as a start from gradients estimates it; None of the others.
    """
    config, model = engine.config, engine.model
    start: Callable[[], float | None]
    if config.initial_checkpoint is not None:
        start = functools.partial(dynakv.initialise_from_checkpoint, model, config.initial_checkpoint)
    elif config.starts_from_gradients:
        moments, gradients = _moments(engine, stream, gradients=True)
        rate = config.rate
        start = functools.partial(
            dynakv.initialise_from_gradients,
            model,
            moments,
            gradients,
            rate.target_retain_rate,
            key_cost=rate.key_cost,
            floor=rate.layer_floor,
        )
    else:
        moments, _ = _moments(engine, stream, gradients=False)
        start = functools.partial(dynakv.initialise_from_moments, model, moments)
    with engine.gathered(engine.compressor_parameters(), write=True):
        price = start()
        engine.share_compressors()
    if price is None:
        return None
    # Near the uncompressed model the KL to it grows as the cross-entropy does (both by the Fisher information).
    return engine.of_first(price * (config.loss.cross_entropy + config.loss.distillation))


def _moments(engine: Engine, stream: TrainingBlocks, *, gradients: bool) -> tuple[Moments, Moments | None]:
    """Second moments of the states and, if asked for, of the loss's gradients with regard to them."""
    config, model = engine.config, engine.model
    if config.calibration.bases is not None:
        calibration = Calibration.load(config.calibration.bases).for_model(model)
        return calibration.second_moments(), calibration.gradients() if gradients else None
    length = min(config.dataset.sequence_length, config.calibration.tokens)
    count = math.ceil(config.calibration.tokens / config.dataset.sequence_length)
    blocks_NT = torch.cat([batch.ids_BT for batch in stream.first(count)])[:, :length]
    with uncompressed(model):
        moments = calibrate(model, blocks_NT, progress=engine.main)
        return moments, gradient_moments(model, blocks_NT, progress=engine.main) if gradients else None
