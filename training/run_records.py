"""The run record of a training: one for a run, however often it is resumed, named in the checkpoints that it wrote."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynakv.dataset_config import DatasetConfig
from lowrank_kv.utils import run_record
from lowrank_kv.utils.config import to_dict
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import files_of
from lowrank_kv.utils.provenance import file_inputs, model_input, name_trainer, path_input

from .engine import Engine

TEXT, HELDOUT = "text", "heldout"  # roles of files in a record's inputs


def check_same_texts(dataset: DatasetConfig, progress: dict[str, Any]) -> None:
    """Raise :class:`UserError` where a file of `dataset.name` is not the one that the resumed run has read: it would go on
    at a place of another text, and its record would say that it read the earlier one."""
    inputs = progress.get("inputs")
    if inputs is None:  # states of earlier versions do not say
        return
    saved = {(each["name"], each["sha256"]) for each in inputs if each["role"] == TEXT}
    files = list(dict.fromkeys(file for name in dataset.name for file in files_of(name)))
    found = [path_input(TEXT, file) for file in files]
    for file, entry in zip(files, found, strict=True):
        if (entry["name"], entry["sha256"]) not in saved:
            known = any(entry["name"] == name for name, _ in saved)
            raise _changed(file, "has changed since the run began" if known else "was not there when the run began")
    # Earlier versions told held-out files by the same role.
    if any(each["role"] == HELDOUT for each in inputs) or not progress["config"]["dataset"].get("heldout"):
        for name in sorted({name for name, _ in saved} - {entry["name"] for entry in found}):
            raise _changed(name, "is gone")


def _changed(file: str, what: str) -> UserError:
    return UserError(
        f"--resume needs the text that the run has read, and {file} of `dataset.name` {what}; give the earlier file, or "
        f"start another run that trains on from this one's checkpoint (`initial_checkpoint`, and another `output`)"
    )


def begin_record(engine: Engine, progress: dict[str, Any] | None) -> dict[str, Any]:
    """The record of the run that begins or is resumed, see :mod:`lowrank_kv.utils.run_record`.

    Args:
        progress: of the state that is resumed, whose run keeps its id, and what it read, which may be gone by now; None
            where a run begins.
    """
    config = engine.config
    steps, names = config.optimizer.steps, dict.fromkeys(config.dataset.name)
    heldout = [name for name in dict.fromkeys(config.dataset.heldout or []) if name not in names]
    starts = {"bases": config.calibration.bases, "checkpoint": config.initial_checkpoint}
    inputs = None if progress is None else progress.get("inputs")  # states of earlier versions do not say
    if inputs is None and engine.main:  # whose record alone is written; texts may be long to hash
        inputs = [
            *(path_input(role, path) for role, path in starts.items() if path is not None),
            model_input(engine.model),
            *file_inputs(TEXT, names),
        ]
    if engine.main:
        known = {(each["name"], each["sha256"]) for each in inputs}
        of_heldout = file_inputs(HELDOUT, heldout)
        inputs = inputs + [each for each in of_heldout if (each["name"], each["sha256"]) not in known]
    record = run_record.new_record(
        "training",
        config=to_dict(config),
        inputs=inputs or [],
        n={"steps": steps, "tokens": steps * engine.blocks_per_step * config.dataset.sequence_length},
        device=str(engine.device),
    )
    return record if progress is None else record | {"run_id": progress["run_id"]}


def write_record(
    record: dict[str, Any], output: Path, metrics: Path, summary: dict[str, Any], checkpoints: list[Path]
) -> None:
    """Write ``output/training/<run id>.json`` and name the run in each checkpoint.

    Args:
        metrics: lines of JSON, which become the record's rows.
        summary: what was measured once.

    Figures that are no finite numbers, such as the KL of a step at which training left the numbers, are null there.
    """
    for checkpoint in checkpoints:
        name_trainer(checkpoint, record["run_id"])
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    outputs = [path_input("checkpoint", checkpoint) for checkpoint in checkpoints]
    rows = [json.loads(line) for line in lines]
    run_record.write(record | _finite({"rows": rows, "summary": summary}) | {"outputs": outputs}, output)


def _finite(value: Any) -> Any:
    """The value, with None for each number in it that is not finite, for which JSON has no word."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
