"""What a run does for :mod:`training.selection`: measure on its way as at its end, and go back to the best step."""

import math
import warnings
from pathlib import Path
from typing import Any

import dynakv
from lowrank_kv.utils.errors import UserError

from .data import Batch, TrainingBlocks
from .engine import Engine
from .finalization import finalize_and_measure
from .reporting import Reporter
from .resumable_state import add_to_progress, load_weights, read_progress, read_weights, step_directory
from .run_state import RunState


def measure_if_due(
    engine: Engine,
    run: RunState,
    stream: TrainingBlocks,
    heldout: dict[str, list[Batch]],
    states: Path,
    reporter: Reporter,
) -> None:
    """Measure what the run would save if it ended here, where that is due; every process must call this, after the state of
    the step is saved.

    Training then continues with what that state holds, as if nothing had been measured. The last step may have no state, and
    only :func:`training.finish.finish` may follow it.

    Args:
        stream: apart from the one that is trained on (:meth:`training.data.TrainingBlocks.apart`).
        heldout, states: as :func:`training.finalization.finalize_and_measure` takes them.
    """
    if not run.selection.is_due(run.step):
        return
    sides = dynakv.token_compressors(engine.model)
    settings = [side.config for side in sides]
    places = run.places.saved[0]
    with reporter.paused(), warnings.catch_warnings():
        # The report of the step says it, and the end of the run may well meet the target.
        for beginning in ("the calibrated threshold leaves the hard rate at", "tokens of the training text take"):
            warnings.filterwarnings("ignore", message=beginning)
        found = finalize_and_measure(engine, stream, heldout, states, step=run.step, places=places)
    entry = run.selection.add(run.step, found)
    directory = step_directory(states, run.step)
    if directory.exists():
        load_weights(engine, read_weights(directory), str(directory))
        if engine.main:
            add_to_progress(directory, run.selection.progress())
    for side, before in zip(sides, settings, strict=True):
        side.config = before
    reporter.heldout(entry, is_best=run.selection.best is entry)
    engine.accelerator.wait_for_everyone()  # the state is whole again for all who read it


def load_best(engine: Engine, run: RunState, states: Path) -> dict[str, Any] | None:
    """Fill the engine, at the end of the run, with what the best step left, before any averaging; every process must call
    this.

    Returns:
        the progress entries of the best step's state; None where that is the last step.

    Raises:
        UserError: the state is lost.
    """
    if not run.selection.measured:
        return None
    best = run.selection.best
    if best is None and engine.main:
        what = f"has a rate near `rate.target_retain_rate`, {engine.config.rate.target_retain_rate}"
        remedy = "train for longer, or measure more often"
        if not any(math.isfinite(entry["kl"]) for entry in run.selection.measured):
            what, remedy = "has a finite divergence", "lower `optimizer.lr_projection`"
        warnings.warn(
            f"`heldout_every` selects nothing: no measured step {what}, and the run ends with its last step; {remedy}",
            stacklevel=2,
        )
    # Processes may round apart: the first decides.
    step = int(engine.broadcast_value(run.step if best is None else best["step"]))
    if step == run.step:
        return None
    directory = step_directory(states, step)
    try:
        progress = read_progress(directory)
    except UserError as error:
        raise UserError(
            f"step {step} was the best on held-out text, and its state is lost: {error}; restore it, or pass --resume with "
            f"`--heldout_every 0`, which ends with the last step"
        ) from error
    load_weights(engine, read_weights(directory), str(directory))
    return progress
