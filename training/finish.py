"""The end of a run: finalize and measure what its last step left, or its best one, and save that."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

import dynakv
from dynakv.checkpoint_files import ISOLATED
from dynakv.known_texts import TEXTS_READ
from dynakv.training_config import COMPRESSOR

from .best_step import load_best
from .data import Batch, TrainingBlocks
from .data_sources import labels_of
from .engine import Engine
from .finalization import finalize_and_measure
from .model_card import write_card
from .optimizer import merged_state
from .reporting import Reporter, write_summary
from .run_records import write_record
from .run_state import RunState
from .selection import SELECTED

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
        ISOLATED: config.dataset.isolate_documents,
        "rounds": dict(zip(labels_of(config.dataset.name), run.places.rounds_of_all(), strict=True)),
        "alpha": run.controller.alpha,
        "target_retain_rate": config.rate.target_retain_rate,
        TEXTS_READ: run.texts_read,
    }
    step, places = run.step, run.places.saved[0]
    best = load_best(engine, run, output / STATES)
    if best is not None:
        step, places = best["step"], best["places"][0]
        summary["alpha"] = best["controller"]["alpha"]
    if config.heldout_every:
        summary |= {SELECTED: step, **run.selection.progress()}
    engine.wrapped.eval()
    summary |= finalize_and_measure(
        engine,
        stream,
        heldout,
        output / STATES,
        step=step,
        places=places,
        note=lambda name, values: reporter.note(name, values, step),
    )
    reporter.close()
    checkpoints = _save(engine, tokenizer, output, summary)
    if engine.main:
        for checkpoint in checkpoints:
            write_card(checkpoint, config, record, summary, is_compressor=checkpoint.name == CHECKPOINT)
        write_record(record, output, reporter.metrics, summary, checkpoints)
    engine.accelerator.wait_for_everyone()
    engine.accelerator.end_training()
    return checkpoints[0]


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
