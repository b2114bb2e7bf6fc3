"""What a calibration is on disk: a directory of `moments.safetensors` and `config.json`.

The second says what model shape it is for, what text was read, and the SHA-256 of the first. A layer has 4·C² numbers, with
the loss's gradients 2·C² more, and with what is read of a compressed cache 4·C² more and some rows; of L layers that are
coded together 4·L·C² more each.

Shapes: C = G·D joint width.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from lowrank_kv.calibration.spectrum import DAMPING
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.hf.geometry import KVGeometry
from lowrank_kv.utils.atomic_write import new_directory, put_back
from lowrank_kv.utils.config import build, check_entries, to_dict
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import path_of

MOMENTS, CONFIG = "moments.safetensors", "config.json"
FORMAT = "lowrank-kv calibration"
_ENTRIES = {
    "model": str,
    "weights": dict | None,
    "geometry": dict,
    "sha256": str,
    "joint_layers": int | None,
    "exact_tokens": dict | None,
    "by_energy": bool | None,
    "damping": float | int | None,
}
# What says which text was read, beside its tokens.
RECORD = {
    "text": list | None,
    "subset": str | None,
    "split": str | None,
    "text_field": str | None,
    "heldout_share": float | int | None,
    "length": int | None,
    "tokens": int | None,
    "tokens_sha256": str | None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """What `config.json` says.

    Attributes:
        model: name of the model that was read.
        geometry: its shape.
        weights: marks of its weights; older calibrations have none.
        joint_layers: how many layers are coded together; None of a calibration that was made before any were.
        exact_tokens: those that what is read of a compressed cache was taken beside; None where nothing was, and of older
            calibrations.
        by_energy: energy stands for the loss's gradients in what is read of a compressed cache.
        damping: of the bases that gates of what is read were fitted in; older calibrations do not say it.
        record: what says which text was read, of :data:`RECORD`; older calibrations say less.
        sha256: of the moments' file.
    """

    model: str
    geometry: KVGeometry
    weights: dict[str, str]
    joint_layers: int | None
    exact_tokens: ExactTokens | None
    by_energy: bool
    damping: float | None
    record: dict[str, Any]
    sha256: str


def write_calibration(
    directory: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    model: str,
    geometry: KVGeometry,
    weights: dict[str, str],
    joint_layers: int,
    exact_tokens: ExactTokens | None,
    by_energy: bool,
    record: dict[str, Any],
) -> str:
    """Write the directory, whole or not at all, and return the hash; an earlier calibration there is replaced.

    Raises:
        UserError: `directory` holds something else; nothing is written.
    """
    data = save(dict(tensors))
    config = {
        "format": FORMAT,
        "model": model,
        "weights": weights,
        "geometry": dataclasses.asdict(geometry),
        **record,
        "joint_layers": joint_layers,
        "exact_tokens": None if exact_tokens is None else to_dict(exact_tokens),
        "by_energy": by_energy,
        "damping": DAMPING,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    with new_directory(directory, MOMENTS) as partial:
        (partial / MOMENTS).write_bytes(data)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return config["sha256"]


def read_config(directory: str | Path) -> CalibrationConfig:
    """The configuration of a calibration. Raises :class:`UserError` where the directory holds none, or a damaged one."""
    directory = path_of(directory, "directory")
    path = directory / CONFIG
    put_back(directory)
    for name in (CONFIG, MOMENTS):  # before anything else: a model's or a compressor's directory lacks one of them
        if not (directory / name).is_file():
            why = f"it has no `{name}`" if directory.is_dir() else "there is no such directory"
            raise UserError(f"`{directory}` is no calibration: {why}; make one with `lowrank-kv calibrate`")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"`{directory}` is no calibration ({error}); make one with `lowrank-kv calibrate`") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UserError(f"`{directory}` is no calibration: {path} names no `format: {FORMAT}`")
    check_entries(values, {**_ENTRIES, **RECORD}, path)
    exact_tokens = values.get("exact_tokens")
    return CalibrationConfig(
        model=values["model"],
        geometry=KVGeometry.from_json(values["geometry"], path),
        weights=values.get("weights") or {},
        joint_layers=values.get("joint_layers"),
        exact_tokens=None if exact_tokens is None else build(ExactTokens, exact_tokens, source=str(path)),
        by_energy=bool(values.get("by_energy")),
        damping=values.get("damping"),
        record={key: values[key] for key in RECORD if key in values},
        sha256=values["sha256"],
    )


def tensor_names(directory: str | Path) -> list[str]:
    """The names of a calibration's tensors. Raises :class:`UserError` where they cannot be read."""
    path = path_of(directory, "directory") / MOMENTS
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise UserError(_unreadable(path, error)) from error


def read_tensors(directory: str | Path, config: CalibrationConfig) -> dict[str, Tensor]:
    """The tensors of a calibration. Raises :class:`UserError` where they are damaged."""
    path = path_of(directory, "directory") / MOMENTS
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(_unreadable(path, error)) from error
    if hashlib.sha256(data).hexdigest() != config.sha256:
        raise UserError(f"{path} is damaged: its SHA-256 is not the recorded one; calibrate again")
    try:
        return load(data)  # the very bytes that were hashed: the file may have changed since
    except SafetensorError as error:
        raise UserError(_unreadable(path, error)) from error


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path} cannot be read ({error}); calibrate again"
