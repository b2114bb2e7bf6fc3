"""From a configuration to what the loop runs on: text, an attached model, an optimizer."""

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dynakv
from lowrank.hf.calibration import calibrate
from lowrank.text import blocks, load_documents
from training.config import DatasetConfig, TrainConfig
from training.data import TrainingBlocks


def training_stream(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> TrainingBlocks:
    """The global stream of training blocks."""
    dataset = config.dataset
    sources = [_documents(dataset, name, dataset.split) for name in dataset.name]
    weights = dataset.weights or [1.0] * len(sources)
    return TrainingBlocks(sources, weights, tokenizer, dataset.sequence_length, seed=config.seed)


def heldout_blocks(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    """Name of each held-out data set → its first blocks."""
    dataset, count = config.dataset, config.heldout_blocks
    names = dataset.heldout or [] if count else []
    return {
        name: blocks(_documents(dataset, name, dataset.heldout_split), tokenizer, dataset.sequence_length, count)
        for name in names
    }


def _documents(dataset: DatasetConfig, name: str, split: str):
    return load_documents(name, subset=dataset.subset, split=split, text_field=dataset.text_field)


def attach_calibrated(model: PreTrainedModel, config: TrainConfig, stream: TrainingBlocks, *, progress: bool) -> None:
    """Give the model compressors started from the PCA of the leading training blocks; every process computes the same."""
    length = min(config.dataset.sequence_length, config.calibration.tokens)
    count = math.ceil(config.calibration.tokens / config.dataset.sequence_length)
    moments = calibrate(model, stream.first(count)[:, :length], progress=progress)
    dynakv.add_compressors(model, config.compressor)
    dynakv.initialise_from_moments(model, moments)


def build_optimizer(model: PreTrainedModel, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over the compressors, with a peak learning rate for each kind of parameter; the backbone is frozen."""
    model.requires_grad_(False)
    groups: dict[str, list[torch.nn.Parameter]] = {"projection": [], "gate": [], "gate_bias": []}
    for layer in dynakv.compressors(model).values():
        layer.requires_grad_(True)
        for compressor in (layer.key, layer.value):
            groups["projection"] += compressor.projection.parameters()
            groups["gate"].append(compressor.gate.weight)
            groups["gate_bias"].append(compressor.gate.bias)
    settings = config.optimizer
    peaks = {"projection": settings.lr_projection, "gate": settings.lr_gate, "gate_bias": settings.lr_gate_bias}
    return torch.optim.AdamW(
        [{"params": parameters, "lr": peaks[name], "peak": peaks[name]} for name, parameters in groups.items()],
        weight_decay=settings.weight_decay,
        betas=(0.9, 0.99),
    )
