"""Which method is best at equal bytes: every method on every window of every text, beside the uncompressed model.

A comparison that is started again in the same directory measures only the missing cells.

Shapes: N windows, T tokens of a window.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from lowrank_kv.hf.loading import DEVICE_HELP, DTYPES, check_length, load_model, load_tokenizer
from lowrank_kv.utils import run_record
from lowrank_kv.utils.config import configuration, option, require, to_dict
from lowrank_kv.utils.paths import name_of
from lowrank_kv.utils.provenance import model_input, path_input, token_input
from lowrank_kv.utils.text_data import CalibrationText
from ojakv import Calibration

from .anatomy.measure import anatomy
from .cells import Cell, Cells
from .measure import Reading, measured
from .measured_model import base_model, check_measured
from .methods import MethodConfig, methods_of, there
from .peers.peer import READ
from .scores import WindowScore, summary
from .texts import TextConfig, check_texts, read_texts


@configuration
class CompareConfig:
    """One comparison."""

    model: str | None = option(None, help="hub id or directory; by default what the first checkpoint was trained on")
    dtype: str = option("bfloat16", help="of the model", choices=DTYPES)
    device: str | None = option(None, help=DEVICE_HELP)
    methods: list[MethodConfig] = option(help="what to compare; the uncompressed cache is always there")
    texts: list[TextConfig] = option(help="texts to measure on")
    prefix: int = option(
        1024,
        help="length of the prompt, after which the text is scored, read as generation reads it; 0 scores one pass",
        unit="tokens",
    )
    length: int = option(2048, help="of a window, the prompt included", unit="tokens")
    windows: int = option(32, help="of each text", unit="windows")
    read: int | None = option(
        None,
        help="spread the windows evenly over this many of a text's first tokens; by default the first windows",
        unit="tokens",
    )
    fraction: float = option(1.0, help="share of the windows to measure, for a first look")
    step: int = option(MAX_DECODE_QUERIES, help="tokens read at a time after the prompt", unit="tokens")
    anatomy: bool = option(
        True, help="also tell where methods put their bytes: tokens, layers, spectra, residuals while decoding"
    )
    bases: str | None = option(
        None, help="directory written by `lowrank-kv calibrate`; by default `calibration` is run where it is needed"
    )
    calibration: CalibrationText | None = option(None, help="text to calibrate presets on where there are no `bases`")

    def __post_init__(self):
        check_texts(self.texts)
        check_measured(self)
        require(0 <= self.prefix < self.length - 1, "prefix", self.prefix, "below `length` by two at least")
        require(self.read is None or self.read >= self.length, "read", self.read, "at least `length`")
        require(0 < self.fraction <= 1, "fraction", self.fraction, "in (0, 1]")
        for key in ("windows", "step"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        if self.prefix == 0:
            exact = [method.name for method in self.methods if method.reads_exactly]
            require(
                not exact,
                "methods",
                exact,
                "without exact prompts where `prefix` is 0: in one pass nothing they compress is ever read",
            )


def compare(config: CompareConfig, output: Path) -> Iterator[dict[str, Any]]:
    """Yield, after each window, the record of this run with a row for each text and method measured so far; the last one
    also says where the methods put their bytes (:func:`evaluation.anatomy.measure.anatomy`).

    Args:
        config: what to compare.
        output: holds the cells of this and earlier runs.
    """
    config = dataclasses.replace(config, methods=there(config.methods))
    name = base_model(config)
    model, tokenizer = load_model(name, dtype=config.dtype, device=config.device), load_tokenizer(name)
    check_length(model, config.length, "length")
    windows = max(1, round(config.windows * config.fraction))
    texts = read_texts(config.texts, tokenizer, config.length, windows, read=config.read)
    read = any(READ in method.needs for method in config.methods)
    calibration, inputs = calibrated(model, tokenizer, config.bases, config.calibration, read=read)
    methods = methods_of(
        config.methods, model, calibration, prompt=config.prefix or config.length, tokens=config.length
    )
    inputs += [path_input("checkpoint", method.checkpoint) for method in config.methods if method.checkpoint]
    record = new_comparison(to_dict(config) | {"model": name_of(name)}, inputs, model, texts, model.device)
    cells = Cells(output)
    if len(cells):
        print(f"{len(cells)} cells were measured here before; those of equal settings are not measured again")
    setting = {
        "model": model_input(model)["sha256"],
        "dtype": config.dtype,
        "prefix": config.prefix,
        "step": config.step,
    }
    setting |= {"bases": [each["sha256"] for each in inputs if each["role"] in ("bases", "calibration")]}
    reading = Reading(prefix=config.prefix, step=config.step)
    for found in measured(model, methods, texts, cells, reading, setting=setting, record=record):
        yield record | _rows(found, config.length)
    if config.anatomy:
        window_T = next(iter(texts.values()))[0]
        told = anatomy(model, tokenizer, methods, calibration, window_T, prefix=config.prefix, step=config.step)
        done = _rows(found, config.length)
        yield record | done | {"summary": done["summary"] | {"anatomy": told}}


def new_comparison(
    config: dict[str, Any],
    inputs: list[dict[str, Any]],
    model: PreTrainedModel,
    texts: dict[str, Tensor],
    device: torch.device,
) -> dict[str, Any]:
    """The record of a comparison that begins, without rows.

    Args:
        config: of the run; `model` in it is the model's name.
        inputs: other than model and texts.
        model: uncompressed.
        texts: label → token ids of the windows, (N, T) int64.
        device: that measures.
    """
    inputs = [*inputs, model_input(model), *(token_input("text", *text) for text in texts.items())]
    n = {"windows": sum(map(len, texts.values())), "tokens": sum(map(Tensor.numel, texts.values()))}
    return run_record.new_record("quality", config=config, inputs=inputs, n=n, device=str(device))


def row_of(method: str, dataset: str, scores: list[WindowScore]) -> dict[str, Any]:
    """One method on one text, as a row of a record."""
    return {"method": method, "dataset": dataset, **summary(scores)}


def markdown(record: Mapping[str, Any]) -> str:
    """The rows of a comparison as a table, one section for each text."""
    lines = [f"# KV-cache methods on {record['config']['model']}", ""]
    for label in dict.fromkeys(row["dataset"] for row in record["rows"]):
        lines += [
            f"## {label}",
            "",
            "| method | bytes | perplexity ratio | KL, nats | equal top-1 | scored tokens |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        for row in (row for row in record["rows"] if row["dataset"] == label):
            ratio, kl = _with_interval(row, "perplexity_ratio", ".3f"), _with_interval(row, "kl", ".4f")
            lines.append(
                f"| {row['method']} | {row['rate']:.3f} | {ratio} | {kl} | {row['top1']:.3f} | {row['scored']} |"
            )
        lines.append("")
    return "\n".join(lines)


def _with_interval(row: Mapping[str, Any], key: str, form: str) -> str:
    if f"{key}_low" not in row:
        return f"{row[key]:{form}}"
    return f"{row[key]:{form}} ({row[f'{key}_low']:{form}}–{row[f'{key}_high']:{form}})"


def calibrated(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    bases: str | None,
    text: CalibrationText | None,
    *,
    read: bool,
) -> tuple[Calibration | None, list[dict[str, Any]]]:
    """The model's calibration, and what it was made of as inputs of a record; (None, []) where there is neither.

    Args:
        bases: directory of one.
        text: to make one where there is none.
        read: whether it is to say what is read of a compressed cache.
    """
    if bases is not None:
        return Calibration.load(bases).for_model(model), [path_input("bases", bases)]
    if text is None:
        return None, []
    ids = text.blocks(tokenizer)
    return Calibration.from_text(model, ids, read=read), [token_input("calibration", ",".join(text.name), ids)]


def _rows(found: Mapping[tuple[str, str], list[Cell]], length: int) -> dict[str, Any]:
    """Rows, the scores of each window of so many tokens, how many windows were read so far, and which run at which commit
    measured how many cells."""
    rows = [row_of(method, text, [cell.score for cell in each]) for (text, method), each in found.items()]
    measured = collections.Counter((cell.run_id, cell.commit) for each in found.values() for cell in each)
    by = [{"run_id": run_id, "commit": commit, "cells": count} for (run_id, commit), count in measured.items()]
    scores = [
        {"method": method, "dataset": text, "windows": [dataclasses.asdict(cell.score) for cell in each]}
        for (text, method), each in found.items()
    ]
    windows = collections.Counter()
    for (text, _), each in found.items():
        windows[text] = max(windows[text], len(each))
    n = {"windows": windows.total(), "tokens": windows.total() * length}
    return {"n": n, "rows": rows, "summary": {"measured_by": by, "windows": scores}}
