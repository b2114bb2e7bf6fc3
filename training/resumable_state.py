"""Resumable training states: trained parameters, optimizer and position in the run, in a directory written atomically.

A state holds full tensors by parameter name, whatever engine and number of processes wrote it, so that any other can read
it. Tensors are safetensors and everything else is JSON; nothing is pickled.
"""

import json
import re
import shutil
import sys
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dynakv.checkpoint import compressor_state, load_state, write_compressor
from dynakv.checkpoint_files import WEIGHTS, read_state
from lowrank_kv.utils.atomic_write import new_directory, put_back, write_text
from lowrank_kv.utils.errors import UserError

from .engine import MOMENTS, Engine

BACKBONE, OPTIMIZER, PROGRESS = "backbone.safetensors", "optimizer.safetensors", "progress.json"
CHECKSUM = "checksum"


def step_directory(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def saved_states(root: Path, *, until: int | None = None) -> list[Path]:
    """Every state under `root` that was written to its end, oldest first; of steps up to `until` only, if that is given."""
    if not root.is_dir():
        return []
    for aside in root.glob(".step-*-old-*"):
        put_back(root / aside.name[1:].partition("-old-")[0])
    found = (path for path in root.iterdir() if re.fullmatch(r"step-\d+", path.name))
    return sorted((path for path in found if until is None or _step_of(path) <= until), key=_step_of)


def _step_of(state: Path) -> int:
    return int(state.name.removeprefix("step-"))


def save_state(
    root: Path, step: int, engine: Engine, progress: dict[str, Any], keep: int, also: Collection[int] = ()
) -> None:
    """Write the state after `step` steps and remove all but the newest `keep`; every process must call this.

    Args:
        root: directory of all states.
        step: optimizer steps done.
        engine: prepared.
        progress: the other entries that a resumed run needs, ready for JSON.
        keep: number of states kept.
        also: steps whose states stay, too.
    """
    compressor = engine.compressor_parameters()
    compressor_ids = {id(parameter) for parameter in compressor}
    # All collectives finish before the first process writes, which may be killed while it does.
    moments = {
        f"{name}.{key}": value for name in engine.parameters for key, value in (engine.moments(name) or {}).items()
    }
    backbone = {
        name: engine.full_tensor(value) for name, value in engine.parameters.items() if id(value) not in compressor_ids
    }
    with engine.gather_full(compressor):
        weights = compressor_state(engine.model) if engine.main else {}
    if engine.main:
        for leftover in root.glob(".step-*-partial-*"):
            shutil.rmtree(leftover)  # of a process that was killed while it wrote
        with new_directory(step_directory(root, step), PROGRESS) as partial:
            write_compressor(engine.model, partial, weights)
            save_file(moments, partial / OPTIMIZER)
            if backbone:
                save_file(backbone, partial / BACKBONE)
            sums = {path.name: checksum(path) for path in sorted(partial.iterdir())}
            (partial / PROGRESS).write_text(_text_of({"step": step, "checksums": sums, **progress}), encoding="utf-8")
        for old in saved_states(root)[:-keep]:
            if _step_of(old) not in also:
                shutil.rmtree(old)
    engine.accelerator.wait_for_everyone()


def add_to_progress(directory: Path, entries: dict[str, Any]) -> None:
    """Add progress entries to a state, which has them or not at any time. Raises :class:`UserError` where it is damaged."""
    write_text(directory / PROGRESS, _text_of(read_progress(directory) | entries))


def _text_of(entries: dict[str, Any]) -> str:
    return json.dumps({**entries, CHECKSUM: _checksum_of(entries)}) + "\n"


def checksum(path: Path) -> int:
    """CRC-32 of a file, which detects the damage of a crash or a bad disk."""
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return value


def _checksum_of(entries: dict[str, Any]) -> int:
    """CRC-32 of the progress entries except their own checksum."""
    return zlib.crc32(json.dumps({key: value for key, value in entries.items() if key != CHECKSUM}).encode())


def read_progress(directory: Path) -> dict[str, Any]:
    """The progress entries of a state.

    Raises:
        UserError: the state is damaged; the message names the file.
    """
    path = directory / PROGRESS
    try:
        progress = json.loads(path.read_text(encoding="utf-8"))
        if _checksum_of(progress) != progress.pop(CHECKSUM):
            raise UserError(f"{path} does not have the checksum it was written with")
        for name, expected in progress["checksums"].items():
            path = directory / name
            if checksum(path) != expected:
                raise UserError(f"{path} does not have the checksum it was written with")
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error})") from error
    return progress


def newest_state(root: Path, *, main: bool) -> tuple[Path, dict[str, Any]]:
    """The newest undamaged state and its progress entries; each damaged one that is newer gets a warning on stderr.

    Args:
        root: directory of all states.
        main: whether to warn.

    Raises:
        UserError: there is no state, or all are damaged.
    """
    states = saved_states(root)
    if not states:
        raise UserError(f"nothing to resume: `{root}` holds no checkpoint; leave out --resume, or check `output`")
    for directory in reversed(states):
        try:
            return directory, read_progress(directory)
        except UserError as error:
            if main:
                print(f"warning: {directory} is damaged and is passed over: {error}", file=sys.stderr, flush=True)
    raise UserError(f"every checkpoint under `{root}` is damaged; remove the directory and start the run again")


def drop_later_states(root: Path, step: int, engine: Engine) -> None:
    """Remove the states after `step`, which are damaged; every process must call this."""
    engine.accelerator.wait_for_everyone()  # until all have read the state they resume from
    if engine.main:
        for directory in saved_states(root):
            if _step_of(directory) > step:
                shutil.rmtree(directory)


_ANEW = "start another run, without --resume and with another `output`"
# The settings that decide which text a step sees and what its parameters are; all others may differ in a resumed run.
_SAME = ("model", "seed", "dtype", "trainable", "lora", "dataset", "compressor", "rate")
_MAY_DIFFER = {
    "dataset.workers",
    "dataset.heldout",
    "dataset.heldout_subset",
    "dataset.heldout_split",
    "dataset.heldout_text_field",
    # α continues at its saved value.
    "rate.target_retain_rate",
    "rate.gain",
    "rate.layer_floor",
    "rate.key_cost",
    "rate.ramp",
    "rate.calibrate_threshold",
    "rate.calibrate_threshold_tokens",
}


def check_same_run(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise :class:`UserError` naming the first key in which a resumed run would not continue the saved one.

    Args:
        saved: configuration in a state. Another version may have written it, with other keys.
        current: configuration now.
    """
    before, now = (_leaves({key: config[key] for key in _SAME if key in config}) for config in (saved, current))
    for key in {**now, **before}:
        if key in _MAY_DIFFER:
            continue
        if key not in before:
            raise UserError(
                f"--resume cannot tell whether `{key}` stays as it was: the run was started by a version that does not know "
                f"it, and now it is {now[key]!r}; go on with that version, or {_ANEW}"
            )
        if key not in now:
            raise UserError(
                f"--resume cannot keep `{key}`: the run was started with {before[key]!r}, and this version does not know "
                f"it; go on with the version that started the run, or {_ANEW}"
            )
        if before[key] != now[key]:
            raise UserError(
                f"--resume cannot change `{key}`: the run was started with {before[key]!r}, and now it is {now[key]!r}; set "
                f"it back, or {_ANEW}"
            )


def changed_settings(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs in two configurations that :func:`check_same_run` takes for one run: full key → before and now.

    Left out are `output`, which may be moved, and keys that only one of them has: another version had other ones.
    """
    before, now = _leaves(saved), _leaves(current)
    shared = (now.keys() & before.keys()) - {"output"}
    return {key: (before[key], now[key]) for key in now if key in shared and before[key] != now[key]}


def _leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Full key (``section.key``) → value, of nested sections."""
    found = {}
    for key, value in values.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def load_into(engine: Engine, directory: Path, step: int) -> None:
    """Fill a prepared engine's parameters and moments from an undamaged state; every process must call this."""
    tensors = read_state(directory / OPTIMIZER)
    expected = {f"{name}.{key}" for name in engine.parameters for key in MOMENTS}
    if tensors.keys() != expected:
        missing, extra = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
        raise UserError(
            f"`{directory}` does not fit this run: missing {missing[:3]}, unexpected {extra[:3]}; go on with the "
            f"version that started the run, or {_ANEW}"
        )
    load_weights(engine, read_weights(directory), str(directory))
    moments = {name: {key: tensors[f"{name}.{key}"] for key in MOMENTS} for name in engine.parameters}
    engine.set_moments(moments, step)


def read_weights(directory: Path) -> dict[str, dict[str, Tensor]]:
    """The trained parameters of a state: name of the file → its tensors."""
    return {name: read_state(directory / name) for name in (WEIGHTS, BACKBONE) if (directory / name).exists()}


def load_weights(engine: Engine, weights: dict[str, dict[str, Tensor]], origin: str) -> None:
    """Fill a prepared engine's parameters with the result of :func:`read_weights`; every process must call this."""
    compressor = engine.compressor_parameters()
    compressor_ids = {id(parameter) for parameter in compressor}
    with engine.gather_full(compressor, write=True):
        load_state(engine.model, weights[WEIGHTS], origin)
    for name, parameter in engine.parameters.items():
        if id(parameter) not in compressor_ids:
            with engine.gather_full([parameter], write=True), torch.no_grad():
                parameter.copy_(weights[BACKBONE][name])
