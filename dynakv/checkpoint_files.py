"""What a compressor checkpoint is on disk: a directory of `compressor.safetensors` and `config.json`.

The first has 4·C² numbers a layer, 6·C² with a plan of bits, 12·N·C² where that codes N layers together, fewer if exported
(:mod:`dynakv.packed_projections`). The second says what model shape it is for, and has the SHA-256 of the tensors and of its
own entries.
"""

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dynakv.config import METHOD, DynaKVConfig
from dynakv.layer_compressor import kind_of_compressor, projection_widths
from dynakv.packed_projections import unpacked
from lowrank_kv.hf.geometry import KVGeometry
from lowrank_kv.utils.atomic_write import put_back
from lowrank_kv.utils.config import build, check_entries, to_dict
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import path_of

WEIGHTS, CONFIG = "compressor.safetensors", "config.json"
# Entry of a checkpoint's summary: whether documents of a block saw nothing of one another.
ISOLATED = "isolate_documents"
SHA256 = "sha256"  # entry of `config.json`: name of a file → its hash, of `config.json` that of all else in it


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What `config.json` of a compressor checkpoint says.

    Attributes:
        weights_sha256: of the tensors' file; None of a checkpoint that was written before there were hashes.
    """

    method: str
    base_model: str
    geometry: KVGeometry
    compressor: DynaKVConfig
    summary: dict[str, Any]
    weights_sha256: str | None = None


def write_files(directory: Path, state: Mapping[str, Tensor], config: CheckpointConfig) -> None:
    """Write tensors and the configuration that has their hash into an existing directory."""
    save_file(dict(state), directory / WEIGHTS)
    # As they are read back: in JSON the keys of a mapping are text, and sort otherwise than numbers.
    entries = json.loads(json.dumps(to_dict(config)))
    del entries["weights_sha256"]
    entries[SHA256] = {WEIGHTS: _hash_of_file(directory / WEIGHTS)}
    entries[SHA256][CONFIG] = _hash_of_entries(entries)
    text = json.dumps(entries, indent=2) + "\n"
    (directory / CONFIG).write_text(text, encoding="utf-8")


def _hash_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of_entries(entries: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode("utf-8")).hexdigest()


def read_config(directory: str | Path) -> CheckpointConfig:
    """The configuration of a compressor checkpoint. Raises :class:`UserError` when it is not one."""
    directory = path_of(directory, "directory")
    path = directory / CONFIG
    put_back(directory)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        runs = directory / "checkpoint"  # of a training run
        hint = f"did you mean `{runs}`?" if (runs / CONFIG).is_file() else "`lowrank-kv train` writes one"
        raise UserError(
            f"`{directory}` is no DynaKV checkpoint: cannot read {path}: {error.strerror}; {hint}"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}); restore the checkpoint or train it again") from error
    if not isinstance(values, dict) or values.get("method") != METHOD:
        raise UserError(
            f"`{directory}` is no DynaKV compressor checkpoint: {path} names no `method: {METHOD}`; `lowrank-kv "
            f"train` writes one, and a calibration is given to `lowrank_kv.compress`, or as `--bases`"
        )
    check_entries(values, {"base_model": str, "geometry": dict, "compressor": dict, "summary": dict}, path)
    unknown = values.keys() - {field.name for field in dataclasses.fields(CheckpointConfig)} - {SHA256}
    if unknown:
        raise UserError(
            f"{path} is damaged: it has an entry `{min(unknown)}`; restore the checkpoint or train it again"
        )
    return CheckpointConfig(
        method=METHOD,
        base_model=values["base_model"],
        geometry=KVGeometry.from_json(values["geometry"], path),
        compressor=build(DynaKVConfig, values["compressor"], source=str(path)),
        summary=values["summary"],
        weights_sha256=_checked_hash(values, path),
    )


def _checked_hash(values: dict[str, Any], path: Path) -> str | None:
    """The hash of the tensors' file that a configuration names, once its own is right."""
    hashes = values.get(SHA256)
    if hashes is None:
        warnings.warn(
            f"{path} has no `{SHA256}`: the checkpoint was written before there were hashes, and damage to it may not show; "
            f"save it again with dynakv.save_compressor",
            stacklevel=4,
        )
        return None
    others = {name: value for name, value in hashes.items() if name != CONFIG} if isinstance(hashes, dict) else {}
    if others.keys() != {WEIGHTS} or hashes.get(CONFIG) != _hash_of_entries({**values, SHA256: others}):
        raise UserError(
            f"{path} is damaged or was changed by hand: its SHA-256 is not the recorded one; restore it, and change "
            f"settings where it is attached, as in dynakv.attach(model, directory, eviction={{'keep_ratio': 0.3}})"
        )
    return hashes[WEIGHTS]


def checked_state(directory: str | Path, config: CheckpointConfig) -> dict[str, Tensor]:
    """The tensors of a checkpoint, unpacked. Raises :class:`UserError` for a file that is damaged."""
    path = path_of(directory, "directory") / WEIGHTS
    state = read_state(path)
    if config.weights_sha256 is not None and _hash_of_file(path) != config.weights_sha256:
        raise UserError(
            f"{path} is damaged: its SHA-256 is not the one recorded in {CONFIG}; copy it again or go back to an earlier "
            f"checkpoint"
        )
    settings = config.compressor
    decoder = kind_of_compressor(settings).kind_of_projection(settings)
    return unpacked(state, decoder, projection_widths(config.geometry, settings), str(path))


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises :class:`UserError` for a missing or truncated one."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); the file is missing or truncated, so copy it again or go back to an "
            f"earlier checkpoint"
        ) from error
