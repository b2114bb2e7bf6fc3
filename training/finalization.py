"""The compressor that a run saves: averaged, with ranks fixed, τ or bounds between classes calibrated, and measured."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dynakv
from dynakv.config import NESTED, SOFT_THRESHOLD

from .checkpoint_averaging import load_mean
from .class_shares import calibrate_bounds, has_classes, measure_class_shares
from .data import Batch, Place, TrainingBlocks
from .engine import Engine
from .nested_ranks import allocate_ranks
from .soft_thresholds import fix_ranks_if_due
from .stream_places import readers_of
from .threshold_calibration import calibrate_threshold
from .validation import measure

# Entries of what is found, of which a run has one where training text says what is kept.
_TRAINING_TEXT = "the training text"
RATE_ENTRIES = CLASSES, RANKS, THRESHOLD = ("measured_classes", "allocated_ranks", "calibrated_threshold")

Note = Callable[[str, dict[str, Any]], None]


def finalize_and_measure(
    engine: Engine,
    stream: TrainingBlocks,
    heldout: dict[str, list[Batch]],
    states: Path,
    *,
    step: int,
    places: list[Place],
    note: Note = lambda name, values: None,
) -> dict[str, Any]:
    """Make the compressor what a run that ends after `step` saves, and measure it; every process must call this.

    Args:
        heldout: name of each held-out text → its blocks.
        states: directory of all states, whose newest until `step` are averaged where that is asked for.
        places: where the training text continues after `step`, of the first process's readers.
        note: told of each measurement by its name.

    Returns:
        the entries of the run's summary.
    """
    config, found = engine.config, {}
    if config.average_checkpoints:
        found["averaged_steps"] = load_mean(
            engine, states, config.average_checkpoints, every=config.checkpoint_every, until=step
        )
    if config.compressor.rank_policy == SOFT_THRESHOLD:
        fix_ranks_if_due(engine, config.optimizer.steps)
    # All processes calibrate on the same text: what the first would train on next.
    following = stream.shard(
        world=engine.world if stream.by_documents else 1,
        start=step * engine.blocks_per_step,
        workers=readers_of(config),
        places=places,
    )
    found["heldout"] = {}
    with engine.computing():
        found |= _calibrate_to_rate(engine, following, note)
        for name, batches in heldout.items():
            found["heldout"][name] = measure(engine.model, batches)
            note(f"held out, {name}", found["heldout"][name])
    return found


def _calibrate_to_rate(engine: Engine, following: TrainingBlocks, note: Note) -> dict[str, Any]:
    """Bring the hard rate to its target on the `following` training text, or measure there what a plan takes."""
    model, config = engine.model, engine.config
    rate, is_nested = config.rate, config.compressor.rank_policy == NESTED
    is_classed = any(map(has_classes, dynakv.token_compressors(model)))
    if not (config.calibrates_threshold or is_nested or is_classed):
        return {}
    blocks = following.first(math.ceil(rate.calibrate_threshold_tokens / config.dataset.sequence_length))
    if is_classed and config.calibrates_bounds:
        key, values = CLASSES, calibrate_bounds(engine, blocks, rate.target_retain_rate, _TRAINING_TEXT)
    elif is_classed:
        key, values = CLASSES, measure_class_shares(model, blocks, _TRAINING_TEXT)
    elif is_nested:
        key, values = RANKS, {"hard_rate": allocate_ranks(model, blocks, rate.target_retain_rate)}
    else:
        key = THRESHOLD
        values = calibrate_threshold(model, blocks, rate.target_retain_rate, floor=rate.layer_floor)
    note(key, values)
    return {key: values}
