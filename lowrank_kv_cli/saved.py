"""Descriptions of what the project writes: compressor checkpoints, full checkpoints and calibrations.

Configurations and the headers of weight files are read, never the weights.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open

from dynakv.checkpoint import CONFIG, WEIGHTS, CheckpointConfig, read_config
from dynakv.config import METHOD, DynaKVConfig
from lowrank_kv.calibration import calibration
from lowrank_kv.hf.geometry import KVGeometry, geometry_of
from lowrank_kv.hf.loading import load_shape
from lowrank_kv.stores.bit_plan import SCALE_BITS
from lowrank_kv.stores.token_plans import PLACE_BYTES
from lowrank_kv.utils.config import build, check_entries, to_dict
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.provenance import RUN_FILE

SIDES = ("key", "value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares of coefficients that a compressor keeps, a number for each compressed layer.

    Attributes:
        source: what they were measured on.
        of_bytes: they are shares of the bytes of a token in 16 bits, as a plan of bits gives them.
        is_mean: only the mean over all layers, keys and values is known, and every number is that.
    """

    source: str
    keys: list[float]
    values: list[float]
    is_mean: bool = False
    of_bytes: bool = False

    @property
    def mean(self) -> float:
        both = [*self.keys, *self.values]
        return sum(both) / len(both)


def describe(path: str | Path) -> dict[str, Any]:
    """What a directory of the project holds, ready for JSON: `kind`, `model`, `shape`, `files` in bytes and how it was made.

    Raises:
        UserError: it holds nothing that the project writes, or is damaged.
    """
    directory = Path(path).expanduser()
    config = _read_json(directory / CONFIG) if (directory / CONFIG).is_file() else {}
    if config.get("method") == METHOD:
        described = _describe_compressor(directory)
    elif config.get("format") == calibration.FORMAT:
        described = _describe_calibration(directory, config)
    elif (config.get("quantization_config") or {}).get("quant_method") == METHOD:
        described = _describe_full(directory, config)
    else:
        raise UserError(f"`{path}` is no checkpoint and no calibration{_hint(directory)}")
    files = sorted(file for file in directory.iterdir() if file.is_file())
    return {**described, "files": {file.name: file.stat().st_size for file in files}}


def measured_rates(directory: str | Path, config: CheckpointConfig) -> Rates | None:
    """The rates of a compressor checkpoint; None where nobody measured any.

    Ranks of `rank_policy: nested` and plans of bits stand in the weights. The rates of gates are those of the first text
    that the training run held out, or else those after the calibration of its threshold.
    """
    geometry, summary = config.geometry, config.summary
    if not config.compressor.has_gates:
        settings = config.compressor
        has_classes = settings.has_plan and settings.token_classes > 1
        return _rates_in_weights(
            Path(directory) / WEIGHTS, geometry, of_bytes=settings.has_plan, has_classes=has_classes
        )
    for text, measured in (summary.get("heldout") or {}).items():
        if "layer_rates" in measured:
            return Rates(source=text, **measured["layer_rates"])
        return _mean_rates(text, measured["hard_rate"], geometry)
    if "settled" in summary:
        return _mean_rates("the training text", summary["settled"]["hard_rate"], geometry)
    return None


def _rates_in_weights(path: Path, geometry: KVGeometry, *, of_bytes: bool, has_classes: bool) -> Rates:
    def rate(weights: Any, layer: int, side: str) -> float:
        if of_bytes:
            bits_K = weights.get_tensor(f"layers.{layer}.{side}.gate.bits").sum(dim=1, dtype=torch.int64)
            share_K = weights.get_tensor(f"layers.{layer}.{side}.gate.shares")
            row_K = (bits_K + SCALE_BITS + 7) // 8
            place = PLACE_BYTES if has_classes else 0.0
            return (float((row_K * share_K).sum()) + place) / (2 * geometry.width)
        return int(weights.get_tensor(f"layers.{layer}.{side}.gate.rank")) / geometry.width

    try:
        with safe_open(path, framework="pt") as weights:
            keys, values = ([rate(weights, index, side) for index in geometry.layers] for side in SIDES)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore the checkpoint or train it again") from error
    source = "every text: all tokens of a layer keep the same"
    if has_classes:
        source = "text whose tokens are divided into classes as the calibration's"
    return Rates(source=source, keys=keys, values=values, of_bytes=of_bytes)


def _mean_rates(source: str, rate: float, geometry: KVGeometry) -> Rates:
    rates = [rate] * len(geometry.layers)
    return Rates(source=source, keys=rates, values=rates, is_mean=True)


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


def _describe_calibration(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    path, moments = directory / CONFIG, directory / calibration.MOMENTS
    check_entries(config, {"model": str, "geometry": dict, "sha256": str, "tokens": int | None}, path)
    try:
        with safe_open(moments, framework="pt") as file:
            sides = sorted({name.rpartition(".")[2] for name in file.keys()})  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise UserError(f"{moments} cannot be read ({error}); calibrate again") from error
    return {
        "kind": "calibration",
        "model": config["model"],
        "shape": _shape(KVGeometry.from_json(config["geometry"], path)),
        "moments": sides,
        "text": config.get("text"),
        "tokens": config.get("tokens"),
        "sha256": config["sha256"],
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
