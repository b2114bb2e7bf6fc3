"""The record of a measurement: one schema for quality, speed, memory and training, one file for each run.

A record is a mapping; :func:`new_record` begins it, so that a training can name its run in the checkpoint, and
:func:`write` seals it as ``results/<kind>/<run id>.json``. A run's id is its date and time (UTC) and a hash of what it began
with; it says nothing else. What distinguishes runs stands in the fields:

=============  ============================================================================================================
command        argv; paths of the machine are cut to their names
code           commit, whether the checkout was dirty, installed version
config         the whole configuration
inputs         checkpoint, bases, texts, the model's configuration and, of comparisons, its weights: role, name, SHA-256, and
               the run that made it
environment    versions, processor, cores, threads, GPU, platform
n              how many: blocks, tokens, repeats, sequences, …
rows           what was measured
summary        what was measured once a run
outputs        what was written, as inputs
sha256         of everything else: a record that is changed by hand no longer loads
legacy         only of runs older than this schema: where they were found, and which fields cannot be proved
=============  ============================================================================================================
"""

import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lowrank_kv.utils.atomic_write import write_text
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.provenance import code_state, environment, without_paths
from lowrank_kv.utils.provenance import command as own_command

SCHEMA = 1
KINDS = ("quality", "speed", "memory", "training")
RUN_ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")

_TYPES = {
    "schema": int,
    "run_id": str,
    "kind": str,
    "command": list,
    "code": dict,
    "config": dict,
    "inputs": list,
    "environment": dict,
    "n": dict,
    "rows": list,
    "summary": dict,
    "outputs": list,
    "sha256": str,
}
_CODE = {"commit": str, "dirty": bool, "version": str}
_INPUT = {"role": str, "name": str, "sha256": str, "run_id": str}
_ENVIRONMENT = {
    "python": str,
    "torch": str,
    "transformers": str,
    "accelerate": str,
    "cpu": str,
    "vector": str,
    "cores": int,
    "threads": int,
    "gpu": str,
    "platform": str,
}
_LEGACY = {"source": list, "added_in": str, "missing": list, "stated": dict}
_MAY_BE_NULL = {"environment.gpu", "environment.vector", "environment.accelerate", "code.version"}
_OF_MACHINE = re.compile(r"(?<![\w.\-/\\}:])(?:~|[A-Za-z]:)?[/\\]\w[^\s]*[/\\]\w")


class RecordError(UserError):
    """A record that does not follow the schema; names the file, the key and the remedy."""


def new_record(
    kind: str,
    *,
    config: Mapping[str, Any],
    inputs: Iterable[Mapping[str, Any]],
    n: Mapping[str, int],
    rows: Iterable[Mapping[str, Any]] = (),
    summary: Mapping[str, Any] | None = None,
    outputs: Iterable[Mapping[str, Any]] = (),
    device: str | None = None,
    argv: list[str] | None = None,
) -> dict[str, Any]:
    """A record of the run that begins, or has just ended, in this process.

    Args:
        kind: one of :data:`KINDS`.
        config: the whole configuration.
        inputs: from :func:`lowrank_kv.utils.provenance.path_input` and its neighbours.
        n: how many blocks, tokens, repeats, … were measured.
        rows, summary, outputs: what was measured and written; may be set later.
        device: what computes; a GPU is named in the environment.
        argv: of the command; by default this process's.
    """
    record = {
        "schema": SCHEMA,
        "run_id": "",
        "kind": kind,
        "command": own_command(argv),
        "code": code_state(),
        "config": without_paths(config),
        "inputs": without_paths(list(inputs)),
        "environment": environment(device),
        "n": dict(n),
        "rows": without_paths(list(rows)),
        "summary": without_paths(summary or {}),
        "outputs": without_paths(list(outputs)),
    }
    return record | {"run_id": run_id(record, datetime.datetime.now(datetime.UTC))}


def run_id(record: Mapping[str, Any], begun: datetime.datetime) -> str:
    """Date and time in UTC, and six digits of the hash of that and of what is known when the run begins."""
    begun = begun.astimezone(datetime.UTC)
    known = {key: record[key] for key in ("kind", "command", "code", "config", "inputs", "environment")}
    digits = hashlib.sha256(_canonical({**known, "begun": begun.isoformat()}).encode("utf-8")).hexdigest()[:6]
    return f"{begun:%Y%m%dT%H%M%S}-{digits}"


def write(record: Mapping[str, Any], root: str | Path = "results") -> Path:
    """Seal and check a record and write ``root/<kind>/<run id>.json``, whole or not at all; returns that path.

    Raises:
        RecordError: the record does not follow the schema; nothing is written.
    """
    record = {key: value for key, value in without_paths(record).items() if key != "sha256"}
    name = f"{record.get('kind')}/{record.get('run_id')}.json"
    try:
        record["sha256"] = seal(record)
    except (TypeError, ValueError) as error:
        raise RecordError(
            f"{name}: cannot be written as JSON ({error}); give plain, finite numbers and text"
        ) from error
    check(record, name)
    path = Path(root) / name
    write_text(path, text_of(record))
    return path


def load(path: str | Path) -> dict[str, Any]:
    """Read and check a record.

    Raises:
        RecordError: the file is missing, is no JSON, does not follow the schema, or was changed after it was written.
    """
    path = Path(path)
    name = f"{path.absolute().parent.name}/{path.name}"  # from within its directory a record is named without it
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RecordError(f"{path}: there is no such record; runs keep theirs as `quality/RUN.json`") from error
    except IsADirectoryError as error:
        raise RecordError(f"{path}: is a directory, and a record is a file; name one, as `quality/RUN.json`") from error
    except ValueError as error:
        raise RecordError(f"{path}: is no run record ({error}); restore it, or measure again") from error
    check(record, name)
    if name != f"{record['kind']}/{record['run_id']}.json":
        raise RecordError(f"{name}: holds {record['kind']} run {record['run_id']}; move it to the place of that name")
    if record["sha256"] != seal(record):
        raise RecordError(
            f"{name}: `sha256` is not that of the rest, so it was changed after it was written; restore it from git or "
            "measure again"
        )
    return record


def check(record: Any, name: str) -> None:
    """Raise :class:`RecordError` unless the record follows the schema. `name` is what errors call the file."""
    if not isinstance(record, dict):
        raise RecordError(f"{name}: must be a mapping; write it by run_record.write")
    if record.get("schema") != SCHEMA:
        raise RecordError(
            f"{name}: `schema` must be {SCHEMA}, got {record.get('schema')!r}; read it with the version that wrote it"
        )
    legacy = record.get("legacy")
    if legacy is not None:
        _check_mapping(legacy, _LEGACY, "legacy", name, nullable=set())
    unproved = set(legacy["missing"]) if legacy else set()
    types = _TYPES | ({"legacy": dict} if legacy is not None else {})
    _check_mapping(record, types, "", name, nullable=unproved)
    if record["kind"] not in KINDS:
        raise RecordError(f"{name}: `kind` must be one of {', '.join(KINDS)}, got {record['kind']!r}")
    if not RUN_ID.fullmatch(record["run_id"]):
        raise RecordError(f"{name}: `run_id` must look like 20261124T101530-3f9a1c, got {record['run_id']!r}")
    nullable = unproved | _MAY_BE_NULL
    if (code := record["code"]) is not None:
        of_version = {"code.commit", "code.dirty"} if isinstance(code, dict) and code.get("version") else set()
        _check_mapping(code, _CODE, "code", name, nullable=nullable | of_version)
    if record["environment"] is not None:
        _check_mapping(record["environment"], _ENVIRONMENT, "environment", name, nullable=nullable)
    for part in ("inputs", "outputs"):
        for entry in record[part] or []:
            key = f"{part}.{entry.get('role')}" if isinstance(entry, dict) else part
            _check_mapping(entry, _INPUT, key, name, nullable=nullable | {f"{key}.run_id"})
    _check_content(record, name)


def seal(record: Mapping[str, Any]) -> str:
    """SHA-256 of everything in the record but the seal itself."""
    return hashlib.sha256(
        _canonical({key: value for key, value in record.items() if key != "sha256"}).encode("utf-8")
    ).hexdigest()


def text_of(record: Mapping[str, Any]) -> str:
    """The record as JSON, a line for each row and each entry of a list."""
    lines = []
    for key, value in record.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            inner = ",\n".join(f"    {json.dumps(each, ensure_ascii=False, separators=(',', ':'))}" for each in value)
            text = f"[\n{inner}\n  ]"
        else:
            text = json.dumps(value, ensure_ascii=False, indent=2).replace("\n", "\n  ")
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _check_mapping(value: Any, types: dict[str, type], prefix: str, name: str, *, nullable: set[str]) -> None:
    if not isinstance(value, dict):
        raise RecordError(f"{name}: `{prefix}` must be a mapping with {', '.join(types)}, got {value!r}")
    dotted = {key: f"{prefix}.{key}" if prefix else key for key in {*types, *value}}
    for key in sorted(set(value) - set(types)):
        raise RecordError(f"{name}: `{dotted[key]}` is not a key of the schema; use one of {', '.join(types)}")
    for key, kind in types.items():
        if key not in value:
            raise RecordError(f"{name}: `{dotted[key]}` is missing; begin the record by run_record.new_record")
        found = value[key]
        if found is None and dotted[key] not in nullable:
            raise RecordError(
                f"{name}: `{dotted[key]}` is null; measure it, or, of a run older than the schema, list it in "
                "`legacy.missing`"
            )
        if found is not None and (not isinstance(found, kind) or kind is int and isinstance(found, bool)):
            raise RecordError(f"{name}: `{dotted[key]}` must be of type {kind.__name__}, got {found!r}")


def _check_content(record: dict[str, Any], name: str) -> None:
    for key, count in (record["n"] or {}).items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise RecordError(f"{name}: `n.{key}` must be a whole number of at least 1, got {count!r}")
    if record["n"] == {}:
        raise RecordError(f"{name}: `n` is empty; say how many blocks, tokens or repeats were measured")
    if not record["rows"] and not record["summary"]:
        raise RecordError(f"{name}: `rows` and `summary` are empty; a run without figures needs no record")
    for row in record["rows"]:
        if not isinstance(row, dict):
            raise RecordError(f"{name}: each of `rows` must be a mapping, got {row!r}")
    _check_portable({key: value for key, value in record.items() if key != "rows"}, "", name)


def _check_portable(value: Any, key: str, name: str) -> None:
    """Refuse paths of a machine, which say nothing elsewhere and may name a user."""
    if isinstance(value, Mapping):
        for inner, each in value.items():
            _check_portable(each, f"{key}.{inner}" if key else inner, name)
    elif isinstance(value, list):
        for each in value:
            _check_portable(each, key, name)
    elif isinstance(value, str) and _OF_MACHINE.search(value):
        raise RecordError(f"{name}: `{key}` holds a path of a machine ({value!r}); give the name alone")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
