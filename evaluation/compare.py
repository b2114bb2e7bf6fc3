"""Which method is best at equal bytes: DynaKV, OjaKV and its fixed relatives, and the full cache on the same text."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

import dynakv
from dynakv.checkpoint import read_config
from lowrank_kv.hf.loading import DEVICE_HELP, DTYPES, check_length, load_model, load_tokenizer
from lowrank_kv.stores.quantization import CACHE_DTYPES, MIXED
from lowrank_kv.utils import run_record
from lowrank_kv.utils.config import configuration, option, require, section, to_dict
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import name_of
from lowrank_kv.utils.provenance import model_input, path_input, token_input, without_paths
from lowrank_kv.utils.text_data import STREAMING_HELP, CalibrationText, Documents, blocks, hold_out, load_documents
from ojakv import PRESETS, Calibration, OjaKVCache, OjaKVConfig, plan_for_bytes

from .peers.quantized_cache import QUANTISED, quantized_maker
from .peers.snapkv import SNAPKV, snapkv_maker
from .perplexity import Score, full_cache, score

BASELINES = (*QUANTISED, SNAPKV)


@configuration
class TextConfig:
    """One text to measure on."""

    label: str = option(help="name of the text in the results")
    name: str = option(help="hub id or local file")
    subset: str | None = option(None, help="configuration name of a hub data set")
    split: str = option("test", help="split of a hub data set")
    text_field: str = option("text", help="column that holds the text")
    streaming: bool = option(False, help=STREAMING_HELP)
    heldout_share: float = option(
        0.0,
        help="measure only the documents that training with this `dataset.heldout_share` leaves out; 0 measures all",
    )
    optional: bool = option(False, help="leave the text out, with a notice, where the local file does not exist")

    def __post_init__(self):
        require(0 <= self.heldout_share <= 1, "heldout_share", self.heldout_share, "between 0 and 1")


@configuration
class CompareConfig:
    """One comparison."""

    checkpoint: list[str] = option([], help="DynaKV compressor checkpoints; the first sets the bytes of the presets")
    texts: list[TextConfig] = option(help="texts to measure on")
    model: str | None = option(None, help="hub id or directory; by default what the checkpoint was trained on")
    dtype: str = option("float32", help="of the model", choices=DTYPES)
    device: str | None = option(None, help=DEVICE_HELP)
    presets: list[str] = option(
        ["static-pca", "static-pca-h", "static-pca-joint", "ojakv"],
        help=f"OjaKV presets to compare, any of {', '.join(PRESETS)}; those with exact prefill need a `prefix`",
    )
    prefill: str | None = option(None, help="what every method's prompt attends to; by default the method's own")
    cache_dtypes: list[str] = option(["model"], help=f"how coefficients are held, any of {', '.join(CACHE_DTYPES)}")
    baselines: list[str] = option([], help=f"peers, any of {', '.join(BASELINES)}")
    byte_rates: list[float] = option([], help="further shares of the full cache's bytes for the presets, e.g. 0.4,0.6")
    block_length: int = option(1024, help="length of a scored block", unit="tokens")
    prefix: int = option(
        0,
        help="score only what follows this many tokens, read as generation reads it; 0 scores one pass",
        unit="tokens",
    )
    blocks: int = option(4, help="blocks of each text", unit="blocks")
    bases: str | None = option(
        None, help="directory written by `lowrank-kv calibrate`; by default `calibration` is run"
    )
    calibration: CalibrationText = section(CalibrationText)

    def __post_init__(self):
        require(bool(self.checkpoint or self.model), "model", self.model, "given where there is no checkpoint")
        require(
            bool(self.checkpoint or self.byte_rates),
            "byte_rates",
            self.byte_rates,
            "given where there is no checkpoint",
        )
        check_texts(self.texts)
        require(self.block_length >= 2, "block_length", self.block_length, "at least 2 tokens")
        require(0 <= self.prefix < self.block_length, "prefix", self.prefix, "below `block_length`")
        require(self.blocks >= 1, "blocks", self.blocks, "at least 1")
        require(all(0 < rate <= 1 for rate in self.byte_rates), "byte_rates", self.byte_rates, "numbers in (0, 1]")
        for key, valid in (("cache_dtypes", CACHE_DTYPES), ("baselines", BASELINES)):
            unknown = sorted(set(getattr(self, key)) - set(valid))
            require(not unknown, key, unknown, f"among {', '.join(valid)}")
        require(
            bool(self.cache_dtypes),
            "cache_dtypes",
            self.cache_dtypes,
            "at least one; `model` holds coefficients as they are",
        )
        unknown = set(self.presets) - set(PRESETS)
        require(not unknown, "presets", sorted(unknown), f"among {', '.join(PRESETS)}")
        self.check_is_read("presets", [name for name in self.presets if self.preset(name).prefill == "exact"])
        self.check_is_read("baselines", self.baselines)
        self.check_is_read("checkpoint", self.checkpoint if self.prefill == "exact" else [])

    def check_is_read(self, key: str, exact: list[str]) -> None:
        """Whatever leaves the prompt's own attention exact would score as the full cache does in one pass."""
        require(
            self.prefix > 0 or not exact,
            key,
            exact,
            "without exact prefill where `prefix` is 0: in one pass nothing they compress is ever read",
        )

    def preset(self, name: str, cache_dtype: str = "model") -> OjaKVConfig:
        """A preset with what this comparison changes of it; one of mixed widths keeps them."""
        own = OjaKVConfig.preset(name, **self.overrides())
        return own if own.cache_dtype == MIXED else dataclasses.replace(own, cache_dtype=cache_dtype)

    def presets_and_dtypes(self) -> list[tuple[str, str]]:
        """(preset, cache dtype) of each row of a preset."""
        return [
            (name, cache_dtype)
            for name in self.presets
            for cache_dtype in ([MIXED] if self.is_mixed(name) else self.cache_dtypes)
        ]

    def is_mixed(self, name: str) -> bool:
        """Whether a preset holds coefficients in mixed widths."""
        return self.preset(name).cache_dtype == MIXED

    def overrides(self) -> dict[str, str]:
        """Settings every method is given."""
        return {} if self.prefill is None else {"prefill": self.prefill}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a comparison; bytes are summed over the scored blocks."""

    method: str
    dataset: str
    rate: float
    cache_bytes: int
    full_bytes: int
    perplexity: float
    perplexity_ratio: float


def compare(config: CompareConfig) -> Iterator[dict[str, Any]]:
    """Yield, after each measurement, the record of this run with the rows so far, text by text.

    The full cache comes first, then every checkpoint, every preset at equal bytes, and the baselines.

    A preset's rate is set, for each text, so that its cache takes the bytes the first checkpoint's took there; further
    rows follow for `byte_rates`.
    """
    settings = [read_config(directory) for directory in config.checkpoint]
    if config.prefill is None:
        found = zip(config.checkpoint, settings, strict=True)
        config.check_is_read("checkpoint", [directory for directory, of in found if of.compressor.prefill == "exact"])
    name = config.model or settings[0].base_model
    model, tokenizer = load_model(name, dtype=config.dtype, device=config.device), load_tokenizer(name)
    check_length(model, config.block_length, "block_length")
    texts = read_texts(config.texts, tokenizer, config.block_length, config.blocks)
    inputs = [path_input("checkpoint", directory) for directory in config.checkpoint]
    calibration = None
    if config.bases:
        calibration = Calibration.load(config.bases).for_model(model)
        inputs.append(path_input("bases", config.bases))
    elif config.presets or SNAPKV in config.baselines:
        ids = config.calibration.blocks(tokenizer)
        calibration = Calibration.from_text(model, ids, read=any(map(config.is_mixed, config.presets)))
        inputs.append(token_input("calibration", ",".join(config.calibration.name), ids))
    record = new_comparison(to_dict(config) | {"model": name_of(name)}, inputs, model, texts, model.device)
    order = {label: i for i, label in enumerate(texts)}
    rows: list[dict[str, Any]] = []
    for row in _measurements(config, model, calibration, texts):
        rows = sorted([*rows, dataclasses.asdict(row)], key=lambda row: order[row["dataset"]])
        yield record | {"rows": rows}


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
        texts: label → token ids of the scored blocks, (N, T) int64.
        device: that measures.
    """
    inputs = [*inputs, model_input(model), *(token_input("text", *text) for text in texts.items())]
    n = {"blocks": sum(map(len, texts.values())), "tokens": sum(map(Tensor.numel, texts.values()))}
    return run_record.new_record("quality", config=config, inputs=inputs, n=n, device=str(device))


def _measurements(
    config: CompareConfig, model: PreTrainedModel, calibration: Calibration | None, texts: dict[str, Tensor]
) -> Iterator[Row]:
    full: dict[str, Score] = {}

    def measure(method: str, label: str, make_cache: Callable[[], Cache]) -> Row:
        measured = score(model, texts[label], make_cache, prefix=config.prefix, description=method)
        return comparison_row(method, label, measured, full.setdefault(label, measured))

    for label in texts:
        yield measure("full", label, lambda: full_cache(model))
    targets: dict[str, list[float]] = {label: list(config.byte_rates) for label in texts}
    checkpoints = zip(config.checkpoint, _checkpoint_methods(config.checkpoint), strict=True)
    for (directory, method), cache_dtype in itertools.product(checkpoints, config.cache_dtypes):
        dynakv.attach(model, directory, cache_dtype=cache_dtype, **config.overrides())
        method = _named(method, cache_dtype)
        for label in texts:
            row = measure(method, label, lambda: dynakv.DynaKVCache.from_model(model))
            if (directory, cache_dtype) == (config.checkpoint[0], config.cache_dtypes[0]):
                targets[label].insert(0, row.rate)
            yield row
        dynakv.detach(model)
    for (preset, cache_dtype), label in itertools.product(config.presets_and_dtypes(), texts):
        for share in targets[label]:
            plan = plan_for_bytes(
                calibration,
                config.preset(preset, cache_dtype),
                min(share, 1.0),
                prompt=config.prefix or config.block_length,
                tokens=config.block_length,
                itemsize=model.dtype.itemsize,
            )
            yield measure(_named(preset, cache_dtype), label, lambda plan=plan: OjaKVCache(model, plan))
    for baseline, label in itertools.product(config.baselines, texts):
        if baseline == SNAPKV:
            makers = [snapkv_maker(model, calibration, min(share, 1.0)) for share in targets[label]]
        else:
            makers = [quantized_maker(model, baseline)]
        for maker in makers:
            yield measure(baseline, label, maker)


def check_texts(texts: list[TextConfig]) -> None:
    """Raise :class:`UserError` unless there are texts, each under a label of its own."""
    require(bool(texts), "texts", texts, "at least one text")
    labels = [text.label for text in texts]
    require(len(set(labels)) == len(labels), "texts", labels, "of different labels")


def read_texts(
    texts: list[TextConfig], tokenizer: PreTrainedTokenizerBase, length: int, count: int
) -> dict[str, Tensor]:
    """Label of each text that is there → `count` blocks of `length` tokens, (count, length) int64."""
    found = {text.label: blocks(_documents(text), tokenizer, length, count) for text in texts if _is_there(text)}
    if not found:
        raise UserError(f"none of the texts is there: {', '.join(text.name for text in texts)}")
    return found


def markdown(record: Mapping[str, Any]) -> str:
    """The rows of a comparison as a table, one section for each text."""
    lines = [f"# KV-cache methods on {record['config']['model']}", ""]
    for label in dict.fromkeys(row["dataset"] for row in record["rows"]):
        lines += [
            f"## {label}",
            "",
            "| method | rate | cache MiB | perplexity | ratio to full |",
            "|---|--:|--:|--:|--:|",
        ]
        for row in (Row(**row) for row in record["rows"] if row["dataset"] == label):
            lines.append(
                f"| {row.method} | {row.rate:.3f} | {row.cache_bytes / 2**20:.2f} | {row.perplexity:.2f} "
                f"| {row.perplexity_ratio:.3f} |"
            )
        lines.append("")
    return "\n".join(lines)


def _checkpoint_methods(directories: list[str]) -> list[str]:
    """What rows call each checkpoint. A record cuts paths of the machine to names; names that occur twice are numbered."""
    if len(directories) == 1:
        return ["dynakv"]
    names = [without_paths(directory) for directory in directories]
    return [f"dynakv:{name} {i}" if names.count(name) > 1 else f"dynakv:{name}" for i, name in enumerate(names, 1)]


def _named(method: str, cache_dtype: str) -> str:
    return method if cache_dtype in ("model", MIXED) else f"{method} {cache_dtype}"


def _documents(text: TextConfig) -> Documents:
    rows = load_documents(
        text.name, subset=text.subset, split=text.split, text_field=text.text_field, streaming=text.streaming
    )
    if not text.heldout_share:
        return rows
    held = hold_out(rows, text.heldout_share)[1]
    if next(iter(held), None) is None:
        raise UserError(
            f"`heldout_share` {text.heldout_share} holds out no document of `{text.name}`; raise it, here and in training"
        )
    return held


def _is_there(text: TextConfig) -> bool:
    if text.optional and not Path(text.name).exists():
        print(f"leaving out `{text.label}`: {text.name} is not there")
        return False
    return True


def comparison_row(method: str, dataset: str, measured: Score, full: Score) -> Row:
    """The line of one method on one text, beside the full cache's score there."""
    return Row(
        method=method,
        dataset=dataset,
        rate=measured.rate,
        cache_bytes=measured.cache_bytes,
        full_bytes=measured.full_bytes,
        perplexity=measured.perplexity,
        perplexity_ratio=measured.perplexity / full.perplexity,
    )
