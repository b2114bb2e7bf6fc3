"""Describe a checkpoint or calibration, or predict the bytes of a cache before anything runs.

    lowrank-kv inspect runs/mine/checkpoint
    lowrank-kv inspect --model MODEL --tokens 32768 --batch 4
    lowrank-kv inspect --model MODEL --tokens 32768 --checkpoint runs/mine/checkpoint
    lowrank-kv inspect --model MODEL --tokens 32768 --preset ojakv-pf --rate 0.4
    lowrank-kv inspect --model MODEL --memory "24 GiB" --preset tokenwise-mixed --rate 0.1 --bases bases/mine

PATH is a compressor checkpoint, a full checkpoint or a calibration: prints its model, shape, rates for each layer, bytes,
and how it was made. With `--model` it reads the model's configuration, no weights, and prints the bytes of an uncompressed
cache and of the compressed cache that `--checkpoint` or `--preset` names, each sequence being one prompt; with `--memory`
also how long each sequence may be.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dynakv.checkpoint_files import WEIGHTS, read_config
from dynakv.known_texts import TEXTS_READ
from dynakv.measured_rates import measured_rates
from lowrank_kv.calibration.calibration import GRADIENTS, Calibration
from lowrank_kv.hf.cache.shared_memory import nbytes_within
from lowrank_kv.hf.geometry import KVGeometry, geometry_of
from lowrank_kv.hf.loading import DTYPES, load_shape
from lowrank_kv.hf.rope import RopeHistory
from lowrank_kv.utils.arguments import ArgumentParser
from lowrank_kv.utils.budget import Budget, parse_size
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import path_of
from lowrank_kv.utils.search import last_where
from lowrank_kv_cli.planned_cache import dynakv_nbytes, preset_nbytes, preset_plan, sliding_window_nbytes
from lowrank_kv_cli.saved import describe
from ojakv import PRESETS, Plan
from ojakv.planned_bytes import LONGEST, break_even

# Keys of a training run's configuration that the text shows; `--json` has all.
SHOWN = ("model", "dataset.name", "dataset.subset", "calibration.start", "rate.target_retain_rate")
# What a calibration says of how it read its text.
READ = ("tokens", "length", "subset", "split", "text_field", "heldout_share", "joint_layers", "tokens_sha256")
_COME_ON_TOP = "this is not counted here, nor what is made of it for decoding"
# Of the cache whose bytes are asked for, where they are not given.
DEFAULTS = {"tokens": 4096, "batch": 1, "dtype": "bfloat16"}


def main(argv: list[str]) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("path", type=path_of, nargs="?", metavar="PATH", help="a checkpoint or calibration")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    group = parser.add_argument_group("the bytes of a cache")
    group.add_argument("--model", metavar="ID", help="hub id or directory; only its configuration is read")
    group.add_argument("--tokens", type=int, metavar="N", help=f"of each sequence [default {DEFAULTS['tokens']}]")
    group.add_argument("--batch", type=int, metavar="B", help=f"sequences [default {DEFAULTS['batch']}]")
    group.add_argument("--dtype", choices=DTYPES, help=f"of the model [default {DEFAULTS['dtype']}]")
    method = group.add_mutually_exclusive_group()
    method.add_argument(
        "--checkpoint", type=path_of, metavar="DIR", help="DynaKV compressor checkpoint, at the rates measured of it"
    )
    method.add_argument("--preset", metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    rate = group.add_mutually_exclusive_group()
    rate.add_argument("--rate", type=float, metavar="R", help="of the preset [default: the preset's own]")
    rate.add_argument(
        "--budget", metavar="SIZE", help="in its place, such as '4096 B/token' or '2 GiB/131072 tokens' of one sequence"
    )
    group.add_argument("--memory", metavar="SIZE", help="for all sequences, such as '24 GiB': how long may each be?")
    group.add_argument(
        "--bases", type=path_of, metavar="DIR", help="written by `lowrank-kv calibrate`, for presets that need it"
    )
    arguments = parser.parse_args(argv)

    if (arguments.path is None) == (arguments.model is None):
        raise UserError("inspect one thing: PATH of a checkpoint or calibration, or `--model` for the bytes of a cache")
    given = [name for name, value in vars(arguments).items() if value is not None and name not in ("path", "json")]
    if arguments.path is not None and given:
        raise UserError(f"`--{given[0]}` is of the bytes of a cache: give `--model` in place of PATH, or leave it out")
    for name in DEFAULTS.keys() - set(given):
        setattr(arguments, name, DEFAULTS[name])
    if arguments.path is not None:
        described = describe(arguments.path)
        print(json.dumps(described, indent=2) if arguments.json else description_text(described))
    else:
        planned = plan(arguments)
        print(json.dumps(planned, indent=2) if arguments.json else plan_text(planned))


def plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """The bytes of the caches that the arguments ask for, ready for JSON.

    Raises:
        UserError: an argument is out of range or needs another, or the checkpoint or bases are of another shape.
    """
    require(arguments.tokens >= 1, "--tokens", arguments.tokens, "at least 1")
    require(arguments.batch >= 1, "--batch", arguments.batch, "at least 1")
    for name in ("rate", "budget", "bases"):
        if getattr(arguments, name) is not None and arguments.preset is None:
            raise UserError(f"`--{name}` is of a preset: give `--preset`, too")
    model = load_shape(arguments.model)
    geometry, itemsize = geometry_of(model), getattr(torch, arguments.dtype).itemsize
    rotation_bytes = RopeHistory.token_nbytes(model, itemsize)
    uncompressed = _PlannedCache("uncompressed", lambda tokens: geometry.full_nbytes(tokens, itemsize))
    caches = [uncompressed]
    if arguments.checkpoint is not None:
        caches.append(_dynakv_cache(arguments, geometry, itemsize, rotation_bytes))
    if arguments.preset is not None:
        caches.append(_preset_cache(arguments, geometry, itemsize, rotation_bytes))
    notes = [note for cache in caches for note in cache.notes]
    windows = sliding_window_nbytes(model, geometry, tokens=arguments.tokens, itemsize=itemsize)
    if windows is None:
        notes.append("the model has layers without attention, too, whose state is not compressed and not counted here")
    elif windows:
        held = f"{windows * arguments.batch:,}"
        notes.append(f"layers with a sliding window are not compressed: they hold {held} bytes, not counted here")
    return {
        "model": arguments.model,
        "shape": geometry.describe(),
        "tokens": arguments.tokens,
        "batch": arguments.batch,
        "dtype": arguments.dtype,
        "memory": arguments.memory,
        "caches": [_row(cache, uncompressed, arguments) for cache in caches],
        "sliding_window_bytes": None if windows is None else windows * arguments.batch,
        "notes": notes,
    }


class _PlannedCache(NamedTuple):
    """A cache that there is not yet.

    Attributes:
        nbytes: tokens of one sequence → bytes.
        notes: what else to say of it.
    """

    name: str
    nbytes: Callable[[int], int]
    notes: Sequence[str] = ()


def _dynakv_cache(
    arguments: argparse.Namespace, geometry: KVGeometry, itemsize: int, rotation_bytes: int
) -> _PlannedCache:
    config = read_config(arguments.checkpoint)
    geometry.check_equal(config.geometry, f"the checkpoint `{arguments.checkpoint}`")
    rates = measured_rates(arguments.checkpoint, config)
    if rates is None:
        raise UserError(
            f"nobody measured what the checkpoint `{arguments.checkpoint}` keeps; train with `dataset.heldout` or "
            f"`rate.target_retain_rate`, which does, or see what `lowrank-kv generate` reports"
        )
    if rates.of_bytes:
        note = f"a compressed token takes {rates.mean:.3f} of its bytes in 16 bits, on {rates.source}"
    else:
        note = f"DynaKV's rate depends on the text: this is {rates.mean:.3f} of all coefficients, as on {rates.source}"
    shared = f"all sequences share the compressor, {(arguments.checkpoint / WEIGHTS).stat().st_size:,} bytes as saved"

    def nbytes(tokens: int) -> int:
        return dynakv_nbytes(config, rates, tokens=tokens, itemsize=itemsize, rotation_bytes=rotation_bytes)

    return _PlannedCache(f"DynaKV, {arguments.checkpoint}", nbytes, [note, f"{shared}; {_COME_ON_TOP}"])


def _preset_cache(
    arguments: argparse.Namespace, geometry: KVGeometry, itemsize: int, rotation_bytes: int
) -> _PlannedCache:
    preset = preset_plan(
        geometry,
        arguments.preset,
        rate=arguments.rate,
        budget=None if arguments.budget is None else Budget.parse(arguments.budget),
        calibration=None if arguments.bases is None else Calibration.load(arguments.bases),
        model=arguments.model,
        itemsize=itemsize,
        rotation_bytes=rotation_bytes,
    )
    return _PlannedCache(
        f"preset {arguments.preset}",
        lambda tokens: preset_nbytes(preset, tokens=tokens, itemsize=itemsize),
        _notes_of(preset, arguments, itemsize),
    )


def _row(cache: _PlannedCache, uncompressed: _PlannedCache, arguments: argparse.Namespace) -> dict[str, Any]:
    held = cache.nbytes(arguments.tokens) * arguments.batch
    row = {
        "cache": cache.name,
        "bytes": held,
        "share": held / (uncompressed.nbytes(arguments.tokens) * arguments.batch),
        "bytes_per_token": held / (arguments.batch * arguments.tokens),
    }
    if arguments.memory is not None:
        memory = parse_size(arguments.memory, "--memory") // arguments.batch
        row["tokens_within"] = last_where(lambda tokens: cache.nbytes(tokens) <= memory, least=1, limit=LONGEST) or 0
    return row


def _notes_of(preset: Plan, arguments: argparse.Namespace, itemsize: int) -> list[str]:
    """What else to say of a preset's plan: a budget's rate, what all sequences share, and from which length on it pays."""
    notes = []
    if arguments.budget is not None:
        notes.append(f"`--budget {arguments.budget}` is a rate of {preset.config.rate:.4f}")
    if arguments.bases is not None:
        shared, tokens = nbytes_within([preset.layers]), arguments.tokens
        saved = preset.geometry.full_nbytes(tokens, itemsize) - preset_nbytes(preset, tokens=tokens, itemsize=itemsize)
        since = f", which they save from {shared * tokens // saved:,} tokens on, together" if saved > 0 else ""
        notes.append(f"all sequences share bases of {shared:,} bytes{since}; {_COME_ON_TOP}")
    if preset.config.follows_text:
        notes.append(break_even(preset, itemsize))
    return notes


def plan_text(planned: dict[str, Any]) -> str:
    """What :func:`plan` returns, as a table."""
    width = max(len(cache["cache"]) for cache in planned["caches"])
    lines = [
        f"{planned['model']}: {planned['shape']}",
        f"{planned['batch']:,} × {planned['tokens']:,} tokens in {planned['dtype']}",
        "",
        f"{'cache':<{width}} {'bytes':>18} {'share':>7} {'bytes per token':>16}"
        + ("" if planned["memory"] is None else f" {'tokens within ' + planned['memory']:>24}"),
    ]
    lines += [
        f"{cache['cache']:<{width}} {cache['bytes']:>18,} {cache['share']:>7.3f} {cache['bytes_per_token']:>16,.0f}"
        + (f" {cache['tokens_within']:>24,}" if "tokens_within" in cache else "")
        for cache in planned["caches"]
    ]
    return "\n".join([*lines, *(f"\n{note}" for note in planned["notes"])])


def description_text(described: dict[str, Any]) -> str:
    """What :func:`lowrank_kv_cli.saved.describe` returns, for people."""
    shape, rates = described["shape"], described.get("rates")
    layers = f"{len(shape['layers'])} layers of {shape['num_kv_heads']} KV heads × {shape['head_dim']} dims"
    rows = {"model": described["model"], "shape": layers, "files": _pairs(described["files"], " bytes")}
    if "moments" in described:
        rows["holds"] = _held_line(described["moments"], by_energy=described["by_energy"])
        rows["text"] = ", ".join(described["text"] or ["not recorded"])
        rows["read"] = _pairs({name: described[name] for name in READ}) or "not recorded"
        rows["SHA-256"] = described["sha256"]
    else:
        rows["compressor"] = _pairs(described["compressor"])
        summary = dict(described["summary"])
        heldout, texts = summary.pop("heldout", {}), summary.pop(TEXTS_READ, None)
        rows["trained"] = _pairs(summary) or "not recorded"
        rows |= {f"held out, {text}": _pairs(found) for text, found in heldout.items()}
        if texts:
            rows["texts read"] = "; ".join(_pairs(each) for each in texts)
        if "training" in described:
            rows["run"] = _pairs(_shown(described["training"])) + (
                f", {described['run']}" if "run" in described else ""
            )
        rows["rates"] = _rates_line(rates)
    width = max(map(len, rows))
    lines = [described["kind"], *(f"  {name:<{width}}  {text}" for name, text in rows.items())]
    if rates and not rates["is_mean"]:
        lines += ["", f"  {'layer':>5} {'keys':>7} {'values':>7}"]
        triples = zip(shape["layers"], rates["keys"], rates["values"], strict=True)
        lines += [f"  {index:>5} {key:>7.3f} {value:>7.3f}" for index, key, value in triples]
    return "\n".join(lines)


def _held_line(moments: Sequence[str], *, by_energy: bool) -> str:
    """What a calibration can be used for, by the names of its moments and by what weighs those of what is read."""
    held = ["moments of keys, values and queries"]
    if any("_read_" in name for name in moments):
        rows = ", joint layers included" if any(name.startswith("key_value_read_") for name in moments) else ""
        weighed = "energies of what is read" if by_energy else "read gradients"
        held.append(f"{weighed}, for the mixed presets and plans of bits{rows}")
    if not set(GRADIENTS.values()).isdisjoint(moments):
        held.append("gradients, for training gates")
    return "; ".join(held)


def _rates_line(rates: dict[str, Any] | None) -> str:
    if rates is None:
        return "not recorded; `lowrank-kv generate` and `compare` measure them"
    keys, values = (sum(rates[side]) / len(rates[side]) for side in ("keys", "values"))
    if rates["of_bytes"]:
        return f"{keys:.3f} of the keys' bytes in 16 bits, {values:.3f} of the values', on {rates['source']}"
    if rates["is_mean"]:
        return f"{keys:.3f} of all coefficients on {rates['source']}, keys and values of all layers together"
    return f"{keys:.3f} of the keys' coefficients, {values:.3f} of the values', on {rates['source']}"


def _shown(training: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name in SHOWN:
        value = training
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        found[name] = value
    return found


def _pairs(values: dict[str, Any], unit: str = "") -> str:
    """Numbers, words and short lists of a mapping on one line; sections within it with dots."""
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            inner = {f"{name}.{key}": each for key, each in value.items()}
            found.append("" if name == "layer_rates" else _pairs(inner, unit))
        elif isinstance(value, list):
            plain = [_word(each) for each in value if not isinstance(each, dict | list)]  # `--json` has tables, too
            found.append(f"{name} {', '.join(plain)}{unit}" if plain else "")
        elif value is not None:
            found.append(f"{name} {_word(value)}{unit}")
    return ", ".join(filter(None, found))


def _word(value: Any) -> str:
    return f"{value:,}" if type(value) is int else f"{value:.4g}" if type(value) is float else str(value or "none")
