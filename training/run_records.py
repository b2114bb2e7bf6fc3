"""The run record of a training: one for a run, however often it is resumed, named in the checkpoints that it wrote."""

import json
from pathlib import Path
from typing import Any

from lowrank_kv.utils import run_record
from lowrank_kv.utils.config import to_dict
from lowrank_kv.utils.provenance import file_inputs, model_input, name_trainer, path_input

from .engine import Engine


def begin_record(engine: Engine, progress: dict[str, Any] | None) -> dict[str, Any]:
    """The record of the run that begins or is resumed, see :mod:`lowrank_kv.utils.run_record`.

    Args:
        progress: of the state that is resumed, whose run keeps its id, and what it read, which may be gone by now; None
            where a run begins.
    """
    config = engine.config
    steps, texts = config.optimizer.steps, [*config.dataset.name, *(config.dataset.heldout or [])]
    starts = {"bases": config.calibration.bases, "checkpoint": config.initial_checkpoint}
    inputs = None if progress is None else progress.get("inputs")  # states of earlier versions do not say
    if inputs is None and engine.main:  # whose record alone is written; texts may be long to hash
        inputs = [
            *(path_input(role, path) for role, path in starts.items() if path is not None),
            model_input(engine.model),
            *file_inputs("text", dict.fromkeys(texts)),
        ]
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
    """
    for checkpoint in checkpoints:
        name_trainer(checkpoint, record["run_id"])
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    outputs = [path_input("checkpoint", checkpoint) for checkpoint in checkpoints]
    rows = [json.loads(line) for line in lines]
    run_record.write(record | {"rows": rows, "summary": summary, "outputs": outputs}, output)
