"""The end of a run: average its checkpoints, calibrate the threshold, measure held-out text, save what was trained."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dynakv
from dynakv.config import NESTED, SOFT_THRESHOLD
from dynakv.known_texts import TEXTS_READ
from dynakv.training_config import COMPRESSOR, TrainConfig

from .checkpoint_averaging import load_mean
from .class_shares import has_classes, measure_class_shares
from .data import Batch, TrainingBlocks
from .data_sources import labels_of
from .engine import Engine
from .model_card import write_card
from .nested_ranks import allocate_ranks
from .optimizer import merged_state
from .reporting import Reporter, write_summary
from .run_records import write_record
from .run_state import RunState
from .soft_thresholds import fix_ranks_if_due
from .stream_places import readers_of
from .threshold_calibration import calibrate_threshold
from .validation import measure

# Directories of a run.
CHECKPOINT, STATES, FULL_CHECKPOINT = "checkpoint", "states", "full"


def finish(
    engine: Engine,
    run: RunState,
    stream: TrainingBlocks,
    heldout: dict[str, list[Batch]],
    tokenizer: PreTrainedTokenizerBase,
    reporter: Reporter,
    record: dict[str, Any],
) -> Path:
    """Finish a run whose last step is done; returns the directory of the final checkpoint. Every process must call this.

    Args:
        heldout: name of each held-out text → its blocks.
        reporter: closed here.
        record: of the run; written here.
    """
    config, output = engine.config, Path(engine.config.output)
    summary = {
        "steps": config.optimizer.steps,
        "tokens": config.optimizer.steps * engine.blocks_per_step * config.dataset.sequence_length,
        "engine": {"type": engine.accelerator.distributed_type.value, "zero_stage": engine.stage},
        "threads": torch.get_num_threads(),
        "processes": engine.world,
        "rounds": dict(zip(labels_of(config.dataset.name), run.places.rounds(), strict=True)),
        "alpha": run.controller.alpha,
        "target_retain_rate": config.rate.target_retain_rate,
        TEXTS_READ: run.texts_read,
    }
    if config.average_checkpoints:
        summary["averaged_steps"] = load_mean(engine, output / STATES, config.average_checkpoints)
    if config.compressor.rank_policy == SOFT_THRESHOLD:
        fix_ranks_if_due(engine, config.optimizer.steps)
    # All processes calibrate on the same text: what the first would train on next.
    following = stream.shard(
        world=engine.world if run.places.has_own_documents else 1,
        start=run.step * engine.blocks_per_step,
        workers=readers_of(config),
        places=run.places.saved[0],
    )
    engine.wrapped.eval()
    with engine.computing():
        summary |= _calibrate_and_measure(engine.model, config, following, heldout, reporter)
    reporter.close()
    checkpoints = _save(engine, tokenizer, output, summary)
    if engine.main:
        for checkpoint in checkpoints:
            write_card(checkpoint, config, record, summary, is_compressor=checkpoint.name == CHECKPOINT)
        write_record(record, output, reporter.metrics, summary, checkpoints)
    engine.accelerator.wait_for_everyone()
    engine.accelerator.end_training()
    return checkpoints[0]


def _calibrate_and_measure(
    model: PreTrainedModel,
    config: TrainConfig,
    following: TrainingBlocks,
    heldout: dict[str, list[Batch]],
    reporter: Reporter,
) -> dict[str, Any]:
    """Bring the hard rate to its target on the `following` training text, or measure there what a plan takes, then measure
    every held-out text."""
    found, step = {"heldout": {}}, config.optimizer.steps
    rate, is_nested = config.rate, config.compressor.rank_policy == NESTED
    is_classed = any(map(has_classes, dynakv.token_compressors(model)))
    if config.calibrates_threshold or is_nested or is_classed:
        blocks = following.first(math.ceil(rate.calibrate_threshold_tokens / config.dataset.sequence_length))
        if is_classed:
            key, values = "measured_classes", measure_class_shares(model, blocks, "the training text")
        elif is_nested:
            key, values = "allocated_ranks", {"hard_rate": allocate_ranks(model, blocks, rate.target_retain_rate)}
        else:
            key = "calibrated_threshold"
            values = calibrate_threshold(model, blocks, rate.target_retain_rate, floor=rate.layer_floor)
        found[key] = values
        reporter.note(key, values, step)
    for name, batches in heldout.items():
        found["heldout"][name] = measure(model, batches)
        reporter.note(f"held out, {name}", found["heldout"][name], step)
    return found


def _save(engine: Engine, tokenizer: PreTrainedTokenizerBase, output: Path, summary: dict[str, Any]) -> list[Path]:
    """Write the final checkpoints; returns their directories, first that of the one to use."""
    config, is_compressor_only, written = engine.config, engine.config.trainable == COMPRESSOR, []
    if is_compressor_only:
        written.append(output / CHECKPOINT)
        with engine.gather_full(engine.compressor_parameters()):
            if engine.main:
                dynakv.save_compressor(engine.model, written[-1], summary=summary)
    if config.full_checkpoint or not is_compressor_only:
        written.append(output / FULL_CHECKPOINT)
        state = merged_state(engine)
        if engine.main:
            dynakv.save_full(engine.model, written[-1], state=state)
            tokenizer.save_pretrained(written[-1])
    if engine.main:
        write_summary(output, summary, config)
    return written
