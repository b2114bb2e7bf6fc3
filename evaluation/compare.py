"""Which method is best at equal bytes: every method on every window of every text, beside the uncompressed model.

A comparison that is started again in the same directory measures only the missing cells.

Shapes: N windows, T tokens of a window.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.hf.loading import check_length, load_tokenizer
from lowrank_kv.utils import run_record
from lowrank_kv.utils.config import configuration, option, require, to_dict
from lowrank_kv.utils.intervals import with_interval
from lowrank_kv.utils.paths import name_of
from lowrank_kv.utils.provenance import model_input, path_input, token_input, weights_input

from .anatomy.measure import anatomy
from .cells import Cell, measured_by
from .methods import available_methods, methods_of
from .output import MakeRecord
from .peers.peer import TextLength
from .reading import Reading
from .run_setup import MethodsConfig, calibration_of, cells_in, setting_of
from .scores import WindowScore, extent, summary
from .texts import TextConfig, Windows, check_texts, documents_told, measured_texts, read_texts
from .wide_products import load_measured
from .window_cells import measure_cells


@configuration
class CompareConfig(MethodsConfig):
    """One comparison."""

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
        help="spread the windows evenly over this many of a text's first tokens; by default over all of its documents",
        unit="tokens",
    )
    anatomy: bool = option(
        True, help="also tell where methods put their bytes: tokens, layers, spectra, residuals while decoding"
    )

    def __post_init__(self):
        super().__post_init__()
        check_texts(self.texts)
        require(0 <= self.prefix < self.length - 1, "prefix", self.prefix, "below `length` by two at least")
        require(self.read is None or self.read >= self.length, "read", self.read, "at least `length`")
        require(self.windows >= 1, "windows", self.windows, "at least 1")
        if self.prefix == 0:
            exact = [method.name for method in self.methods if method.reads_exactly]
            require(
                not exact,
                "methods",
                exact,
                "without exact prompts where `prefix` is 0: in one pass nothing they compress is ever read",
            )


def compare(config: CompareConfig, output: Path) -> Iterator[MakeRecord]:
    """Yield, after each window, what makes the record of this run with a row for each text and method measured so far; the
    last one also says where the methods put their bytes (:func:`evaluation.anatomy.measure.anatomy`).

    Args:
        config: what to compare.
        output: holds the cells of this and earlier runs.
    """
    config = dataclasses.replace(config, methods=available_methods(config.methods))
    name = config.model_name
    tokenizer, bases = load_tokenizer(name), config.load_bases()
    texts = read_texts(config.texts, tokenizer, config.length, config.share_of(config.windows), read=config.read)
    model = load_measured(name, dtype=config.dtype, device=config.device)
    check_length(model, config.length, "length")
    calibration, inputs = calibration_of(
        model,
        tokenizer,
        config,
        bases,
        read_gradients=config.needs_read_gradients,
        measured=measured_texts(config.texts),
        needed=config.needs_calibration or config.anatomy,
    )
    text = TextLength(config.prefix or config.length, config.length)
    methods = methods_of(config.methods, model, calibration, text)
    inputs += [path_input("checkpoint", directory) for directory in config.checkpoints]
    ids = {label: each.ids_NT for label, each in texts.items()}
    record = new_comparison(to_dict(config) | {"model": name_of(name)}, inputs, model, ids, model.device)
    cells, reading = cells_in(output, record), Reading(prefix=config.prefix, step=config.step)
    setting = setting_of(record, config.dtype)
    for found in measure_cells(model, methods, ids, cells, reading, setting=setting, record=record):
        yield functools.partial(_record_so_far, record, found, texts)
    if config.anatomy:
        window_T = next(iter(ids.values()))[0]
        told = anatomy(model, tokenizer, methods, calibration, window_T, prefix=config.prefix, step=config.step)
        done = _record_so_far(record, found, texts)
        yield lambda: done | {"summary": done["summary"] | {"anatomy": told}}


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
    inputs = [
        *inputs,
        model_input(model),
        weights_input(model),
        *(token_input("text", *text) for text in texts.items()),
    ]
    n = {"windows": sum(map(len, texts.values())), "tokens": sum(map(Tensor.numel, texts.values()))}
    return run_record.new_record("quality", config=config, inputs=inputs, n=n, device=str(device))


def row_of(
    method: str, dataset: str, scores: Mapping[str, Sequence[WindowScore]], texts: Mapping[str, Windows]
) -> dict[str, Any]:
    """One method, as a row of a record.

    Args:
        dataset: name of the text, or of several together.
        scores: label of a text → those of its first windows.
        texts: label → the windows.
    """
    documents = [texts[label].documents[: len(each)] for label, each in scores.items()]
    return {"method": method, "dataset": dataset, **summary(list(itertools.chain(*scores.values())), documents)}


def rows_of_cells(found: Mapping[tuple[str, str], list[Cell]], texts: Mapping[str, Windows]) -> list[dict[str, Any]]:
    """A row for each (text, method's label) that :func:`evaluation.window_cells.measure_cells` found cells of."""
    return [
        row_of(method, text, {text: [cell.score for cell in each]}, texts) for (text, method), each in found.items()
    ]


def markdown(record: Mapping[str, Any]) -> str:
    """The rows of a comparison as a table, one section for each text."""
    lines = [f"# KV-cache methods on {record['config']['model']}", ""]
    for label in dict.fromkeys(row["dataset"] for row in record["rows"]):
        lines += [
            f"## {label}{_extent(record, label)}",
            "",
            "| method | bytes | perplexity ratio | KL, nats | equal top-1 | scored tokens |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        for row in (row for row in record["rows"] if row["dataset"] == label):
            ratio, kl = with_interval(row, "perplexity_ratio", ".3f"), with_interval(row, "kl", "z.4f")
            lines.append(
                f"| {row['method']} | {row['rate']:.3f} | {ratio} | {kl} | {row['top1']:.3f} | {row['scored']} |"
            )
        lines.append("")
    return "\n".join(lines)


def _extent(record: Mapping[str, Any], label: str) -> str:
    """How many windows of how many documents a text's rows are of."""
    row = next(row for row in record["rows"] if row["dataset"] == label)
    over = sum(count > 1 for count in record["summary"]["documents"][label]["touched"][: row["windows"]])
    return f" ({extent(row)}{f', {over} over the end of a document' if over else ''})"


def _record_so_far(
    record: dict[str, Any], found: Mapping[tuple[str, str], list[Cell]], texts: Mapping[str, Windows]
) -> dict[str, Any]:
    """The record with rows, the scores and the documents of each window, how many windows were read so far, and which run
    at which commit measured how many cells."""
    by = measured_by(cell for each in found.values() for cell in each)
    scores = [
        {"method": method, "dataset": text, "windows": [dataclasses.asdict(cell.score) for cell in each]}
        for (text, method), each in found.items()
    ]
    told = {"measured_by": by, "windows": scores, "documents": documents_told(texts)}
    return record | {"n": read_so_far(found, texts), "rows": rows_of_cells(found, texts), "summary": told}


def read_so_far(found: Mapping[tuple[str, str], list[Cell]], texts: Mapping[str, Windows]) -> dict[str, int]:
    """How many windows, and tokens of them, some method has read."""
    windows = collections.Counter()
    for (text, _), each in found.items():
        windows[text] = max(windows[text], len(each))
    tokens = sum(texts[text].ids_NT[:count].numel() for text, count in windows.items())
    return {"windows": windows.total(), "tokens": tokens}
