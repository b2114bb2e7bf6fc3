"""Which method is best at equal bytes: DynaKV, static bases and the full cache on the same text."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dynakv
from dynakv.checkpoint import read_config
from evaluation.perplexity import Score, full_cache, score
from evaluation.static import STATIC_METHODS, static_cache
from lowrank.atomic import write_text
from lowrank.config import option, require, section
from lowrank.errors import UserError
from lowrank.hf.calibration import KEY, ROTATED_KEY, VALUE, calibrate
from lowrank.hf.loading import DTYPES, check_length, load_model, load_tokenizer
from lowrank.text import blocks, load_documents


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """One text to measure on."""

    label: str = option(help="name of the text in the results")
    name: str = option(help="hub id or local file")
    subset: str | None = option(None, help="configuration name of a hub data set")
    split: str = option("test", help="split of a hub data set")
    text_field: str = option("text", help="column that holds the text")
    optional: bool = option(False, help="leave the text out, with a notice, where the local file does not exist")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationText:
    """What the static bases are computed on."""

    name: list[str] = option(["Salesforce/wikitext"], help="hub ids or local files, equal shares of each")
    subset: str | None = option(None, help="configuration name of a hub data set")
    split: str = option("train", help="split of a hub data set")
    text_field: str = option("text", help="column that holds the text")
    tokens: int = option(8192, help="how much of it", unit="tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """One comparison."""

    checkpoint: list[str] = option(help="DynaKV compressor checkpoints; the first sets the bytes of the static methods")
    texts: list[TextConfig] = option(help="texts to measure on")
    model: str | None = option(None, help="hub id or directory; by default what the checkpoint was trained on")
    dtype: str = option("float32", help="of the model", choices=DTYPES)
    static: list[str] = option(list(STATIC_METHODS), help="static methods beside it")
    rates: list[float] = option([], help="further rates for the static methods, e.g. 0.2,0.4,0.6")
    block_length: int = option(1024, help="length of a scored block", unit="tokens")
    blocks: int = option(4, help="blocks of each text", unit="blocks")
    calibration: CalibrationText = section(CalibrationText)

    def __post_init__(self):
        require(bool(self.checkpoint), "checkpoint", self.checkpoint, "at least one directory")
        require(bool(self.texts), "texts", self.texts, "at least one text")
        require(self.block_length >= 2, "block_length", self.block_length, "at least 2 tokens")
        require(self.blocks >= 1, "blocks", self.blocks, "at least 1")
        require(all(0 < rate <= 1 for rate in self.rates), "rates", self.rates, "numbers in (0, 1]")
        unknown = set(self.static) - set(STATIC_METHODS)
        require(not unknown, "static", sorted(unknown), f"among {', '.join(STATIC_METHODS)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of `comparison.json`; bytes are summed over the scored blocks."""

    method: str
    dataset: str
    rate: float
    cache_bytes: int
    full_bytes: int
    perplexity: float
    perplexity_ratio: float


def compare(config: CompareConfig) -> tuple[str, list[Row]]:
    """(model name, rows): the full cache, every checkpoint, and every static method at the first checkpoint's bytes."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("the comparison's plot needs matplotlib; pip install -c constraints.txt -e '.[demo]'")
    settings = [read_config(directory) for directory in config.checkpoint]
    name = config.model or settings[0].base_model
    model, tokenizer = load_model(name, dtype=config.dtype), load_tokenizer(name)
    check_length(model, config.block_length, "block_length")
    texts = {
        text.label: blocks(_documents(text, text.name), tokenizer, config.block_length, config.blocks)
        for text in config.texts
        if _is_there(text)
    }
    if not texts:
        raise UserError(f"none of the texts is there: {', '.join(text.name for text in config.texts)}")
    full = {label: score(model, text, lambda: full_cache(model), description="full") for label, text in texts.items()}
    rows = [_row("full", label, full[label], full[label]) for label in texts]
    learned: list[dict[str, Score]] = []
    for directory in config.checkpoint:
        dynakv.attach(model, directory)
        label_of = "dynakv" if len(config.checkpoint) == 1 else f"dynakv:{directory}"
        learned.append({label: _score_learned(model, text, label_of) for label, text in texts.items()})
        rows += [_row(label_of, label, learned[-1][label], full[label]) for label in texts]
        dynakv.detach(model)
    if config.static:
        moments = calibrate(model, calibration_blocks(config, tokenizer), sides=(KEY, ROTATED_KEY, VALUE))
        for method in config.static:
            for label, text in texts.items():
                for rate in (learned[0][label].rate, *config.rates):
                    measured = score(
                        model, text, static_cache(model, moments, method, min(rate, 1)), description=method
                    )
                    rows.append(_row(method, label, measured, full[label]))
    order = {label: i for i, label in enumerate(texts)}
    # A directory is a place on this machine; its last part names the model.
    name = Path(name).name if Path(name).is_dir() else name
    return name, sorted(rows, key=lambda row: order[row.dataset])


def write_comparison(directory: str | Path, model: str, rows: list[Row]) -> None:
    """Write `comparison.json`, `comparison.md` and `pareto.png` into `directory`."""
    directory = Path(directory)
    figure = plot(rows)
    values = {"model": model, "rows": [dataclasses.asdict(row) for row in rows]}
    write_text(directory / "comparison.json", json.dumps(values, indent=2) + "\n")
    write_text(directory / "comparison.md", markdown(model, rows))
    figure.savefig(directory / "pareto.png", dpi=120)


def markdown(model: str, rows: list[Row]) -> str:
    """The rows as a table, one section for each text."""
    lines = [f"# KV-cache methods on {model}", ""]
    for label in dict.fromkeys(row.dataset for row in rows):
        lines += [
            f"## {label}",
            "",
            "| method | rate | cache MiB | perplexity | ratio to full |",
            "|---|--:|--:|--:|--:|",
        ]
        for row in (row for row in rows if row.dataset == label):
            lines.append(
                f"| {row.method} | {row.rate:.3f} | {row.cache_bytes / 2**20:.2f} | {row.perplexity:.2f} "
                f"| {row.perplexity_ratio:.3f} |"
            )
        lines.append("")
    return "\n".join(lines)


def plot(rows: list[Row]):
    """A figure of perplexity ratio against the share of bytes, a panel for each text."""
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(row.dataset for row in rows))
    figure = Figure(figsize=(5 * len(labels), 4), layout="constrained")
    axes = figure.subplots(1, len(labels), squeeze=False)
    for axis, label in zip(axes[0], labels, strict=True):
        for method in dict.fromkeys(row.method for row in rows):
            points = sorted((r.rate, r.perplexity_ratio) for r in rows if (r.method, r.dataset) == (method, label))
            axis.plot(*zip(*points, strict=True), marker="o", label=method)
        axis.set(title=label, xlabel="bytes of the cache / full cache", ylabel="perplexity / full cache", yscale="log")
        axis.grid(alpha=0.3, which="both")
    axes[0][0].legend(fontsize="small")
    return figure


def _score_learned(model: PreTrainedModel, text: Tensor, description: str) -> Score:
    return score(model, text, lambda: dynakv.DynaKVCache.from_model(model), description=description)


def calibration_blocks(config: CompareConfig, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """What the static bases are computed on, (count, T) int64."""
    text = config.calibration
    length = min(config.block_length, text.tokens)
    count = max(1, text.tokens // (length * len(text.name)))
    return torch.cat([blocks(_documents(text, name), tokenizer, length, count) for name in text.name])


def _documents(text: TextConfig | CalibrationText, name: str):
    return load_documents(name, subset=text.subset, split=text.split, text_field=text.text_field)


def _is_there(text: TextConfig) -> bool:
    if text.optional and not Path(text.name).exists():
        print(f"leaving out `{text.label}`: {text.name} is not there")
        return False
    return True


def _row(method: str, dataset: str, measured: Score, full: Score) -> Row:
    return Row(
        method=method,
        dataset=dataset,
        rate=measured.rate,
        cache_bytes=measured.cache_bytes,
        full_bytes=measured.full_bytes,
        perplexity=measured.perplexity,
        perplexity_ratio=measured.perplexity / full.perplexity,
    )
