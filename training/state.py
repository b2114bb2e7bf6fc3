"""Resumable training state: compressor, optimizer and position in the run, in one directory that appears whole.

Tensors are safetensors and everything else JSON; nothing is pickled.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from dynakv.checkpoint import WEIGHTS, compressor_state, load_state, read_state, write_compressor
from lowrank.atomic import new_directory
from lowrank.errors import UserError

OPTIMIZER, PROGRESS = "optimizer.safetensors", "progress.json"


def step_directory(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def save_state(
    root: Path, step: int, model: PreTrainedModel, optimizer: torch.optim.Optimizer, progress: dict[str, Any], keep: int
) -> None:
    """Write the state after `step` steps and remove all but the newest `keep`."""
    tensors = {
        f"{index}.{name}": value.detach().to("cpu", copy=True).contiguous()
        for index, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
    }
    with new_directory(step_directory(root, step)) as partial:
        write_compressor(model, partial, compressor_state(model))
        save_file(tensors, partial / OPTIMIZER)
        (partial / PROGRESS).write_text(json.dumps({"step": step, **progress}) + "\n", encoding="utf-8")
    for old in saved_states(root)[:-keep]:
        shutil.rmtree(old)


def saved_states(root: Path) -> list[Path]:
    """Every whole state under `root`, oldest first."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if re.fullmatch(r"step-\d+", path.name))


# What decides which text a step sees and what its parameters are; anything else may differ when a run goes on.
_SAME = ("model", "seed", "dtype", "dataset", "compressor", "optimizer.batch_size", "optimizer.accumulate")


def check_same_run(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise :class:`UserError` naming the first key in which a resumed run would not continue the saved one."""
    for key in _SAME:
        before, now = saved, current
        for name in key.split("."):
            before, now = before[name], now[name]
        if before != now:
            raise UserError(
                f"--resume cannot change `{key}`: the run was started with {before!r}, and now it is {now!r}"
            )


def load_latest(root: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill an attached model and its optimizer from the newest state; returns its progress entries.

    Raises:
        UserError: there is none, or it is damaged.
    """
    states = saved_states(root)
    if not states:
        raise UserError(f"nothing to resume: `{root}` holds no checkpoint; leave out --resume, or check `output`")
    latest = states[-1]
    try:
        progress = json.loads((latest / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(
            f"{latest / PROGRESS} is damaged ({error}); remove {latest} to resume from the one before"
        ) from error
    tensors = read_state(latest / OPTIMIZER)
    load_state(model, read_state(latest / WEIGHTS), str(latest))
    entries: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        entries.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})
    return progress
