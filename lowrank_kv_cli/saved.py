"""Descriptions of what the project writes: compressor checkpoints, full checkpoints and calibrations.

Configurations and the headers of weight files are read, never the weights.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml

from dynakv.checkpoint_files import CONFIG, read_config
from dynakv.config import METHOD, DynaKVConfig
from dynakv.measured_rates import measured_rates
from lowrank_kv.calibration import calibration_files
from lowrank_kv.hf.geometry import KVGeometry, geometry_of
from lowrank_kv.hf.loading import load_shape
from lowrank_kv.utils.config import build, to_dict
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import path_of
from lowrank_kv.utils.provenance import RUN_FILE


def describe(path: str | Path) -> dict[str, Any]:
    """What a directory of the project holds, ready for JSON: `kind`, `model`, `shape`, `files` in bytes and how it was made.

    Raises:
        UserError: it holds nothing that the project writes, or is damaged.
    """
    directory = path_of(path)
    config = _read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}
    if config.get("method") == METHOD:
        described = _describe_compressor(directory)
    elif config.get("format") == calibration_files.FORMAT:
        described = _describe_calibration(directory)
    elif (config.get("quantization_config") or {}).get("quant_method") == METHOD:
        described = _describe_full(directory, config)
    else:
        raise UserError(f"`{path}` is no checkpoint and no calibration{_hint(directory)}")
    files = sorted(file for file in directory.iterdir() if file.is_file())
    return {**described, "files": {file.name: file.stat().st_size for file in files}}


def _describe_compressor(directory: Path) -> dict[str, Any]:
    config = read_config(directory)
    rates = measured_rates(directory, config)
    return {
        "kind": "DynaKV compressor checkpoint",
        "model": config.base_model,
        "shape": _shape(config.geometry),
        "compressor": to_dict(config.compressor),
        "rates": None if rates is None else dataclasses.asdict(rates),
        "summary": config.summary,
        **_run(directory),
    }


def _describe_full(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    settings = config["quantization_config"].get("settings")
    summary = directory.parent / "summary.yaml"  # a full checkpoint itself has no place for one
    run = _run(directory)
    return {
        "kind": "full DynaKV checkpoint",
        "model": ", ".join(config.get("architectures") or [str(config.get("model_type"))]),
        "shape": _shape(geometry_of(load_shape(str(directory)))),
        "compressor": to_dict(build(DynaKVConfig, settings, source=f"`quantization_config` of {directory / CONFIG}")),
        "summary": _read_yaml(summary) if "training" in run else {},
        **run,
    }


def _describe_calibration(directory: Path) -> dict[str, Any]:
    config = calibration_files.read_config(directory)
    sides = sorted({name.rpartition(".")[2] for name in calibration_files.tensor_names(directory)})
    return {
        "kind": "calibration",
        "model": config.model,
        "shape": _shape(config.geometry),
        "moments": sides,
        "joint_layers": config.joint_layers,
        "by_energy": config.by_energy,
        **{key: config.record.get(key) for key in calibration_files.RECORD},
        "sha256": config.sha256,
    }


def _shape(geometry: KVGeometry) -> dict[str, Any]:
    return {**dataclasses.asdict(geometry), "layers": list(geometry.layers), "width": geometry.width}


def _run(directory: Path) -> dict[str, Any]:
    """The configuration of the training run that the checkpoint still lies with, and the run's name, where there are any."""
    found = {}
    config = _read_yaml(directory.parent / "config.yaml")
    if {"dataset", "optimizer", "compressor"} <= config.keys():
        found["training"] = config
    if (directory / RUN_FILE).is_file():
        found["run"] = _read_json(directory / RUN_FILE).get("run_id")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}); restore the file, or make it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: it holds no keys and values; restore the file, or make it again")
    return values


def _read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a file beside the checkpoint, which may be another's; empty where there is none."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return values if isinstance(values, dict) else {}


def _hint(directory: Path) -> str:
    if not directory.is_dir():
        return ": there is no such directory"
    inside = [directory / name for name in ("checkpoint", "full") if (directory / name / CONFIG).is_file()]
    if inside:
        return f"; did you mean {' or '.join(f'`{each}`' for each in inside)}?"
    return (
        f"; such directories have a {CONFIG} that `lowrank-kv train` or `lowrank-kv calibrate` wrote (for a model without a "
        f"compressor give `--model`)"
    )
