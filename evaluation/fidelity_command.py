"""Measure how faithful caches are to the uncompressed model: divergence, agreement and perplexity, with intervals.

    python scripts/measure_fidelity.py --config configs/fidelity-demo.yaml --results results

Every method reads the same windows of the same texts; a prompt is read exactly, and what follows it is scored. Prints a
table, and with `--results` writes the run's record.
"""

from collections.abc import Callable, Iterator
from typing import Any

from transformers import Cache, PreTrainedModel

import dynakv
from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from lowrank_kv.hf.loading import DEVICE_HELP, DTYPES, check_length, load_model, load_tokenizer
from lowrank_kv.utils import cli, run_record
from lowrank_kv.utils.config import configuration, option, parse_config, require, to_dict
from lowrank_kv.utils.paths import name_of
from lowrank_kv.utils.provenance import model_input, path_input, token_input
from ojakv import PRESETS, Calibration, OjaKVCache, OjaKVConfig, make_plan

from .compare import TextConfig, check_texts, read_texts
from .fidelity import WindowScore, fidelity, summary, windows_of
from .peers.quantized_cache import QUANTISED, quantized_maker
from .peers.rotated import ROTATED, rotated_maker
from .perplexity import full_cache

PEERS = (*ROTATED, *QUANTISED)


@configuration
class LabelledCheckpoint:
    """A compressor checkpoint and its name in the table."""

    label: str = option(help="name in the table")
    directory: str = option(help="of the checkpoint")


@configuration
class FidelityConfig:
    """One measurement."""

    model: str = option(help="hub id or directory")
    dtype: str = option("bfloat16", help="of the model", choices=DTYPES)
    device: str | None = option(None, help=DEVICE_HELP)
    texts: list[TextConfig] = option(help="texts to measure on")
    presets: list[str] = option(
        ["static-mixed"], help=f"OjaKV presets, any of {', '.join(PRESETS)}, with exact prompts"
    )
    rates: list[float] = option([0.25, 0.2, 0.15, 0.1, 0.06], help="of each preset")
    checkpoints: list[LabelledCheckpoint] = option([], help="compressor checkpoints of the model")
    peers: list[str] = option([], help=f"any of {', '.join(PEERS)}")
    bases: str | None = option(None, help="directory written by `lowrank-kv calibrate`; needed for presets")
    prefix: int = option(1024, help="length of the prompt", unit="tokens")
    length: int = option(2048, help="of a window, the prompt included", unit="tokens")
    windows: int = option(32, help="of each text, spread evenly over its first `read` tokens", unit="windows")
    read: int = option(80_000, help="of each text", unit="tokens")
    step: int = option(MAX_DECODE_QUERIES, help="tokens read at a time after the prompt", unit="tokens")

    def __post_init__(self):
        check_texts(self.texts)
        for key, valid in (("presets", PRESETS), ("peers", PEERS)):
            unknown = sorted(set(getattr(self, key)) - set(valid))
            require(not unknown, key, unknown, f"among {', '.join(valid)}")
        inexact = [name for name in self.presets if OjaKVConfig.preset(name).prefill != "exact"]
        require(not inexact, "presets", inexact, "with exact prompts, which is what is measured here")
        require(
            self.bases is not None or not self.presets,
            "bases",
            None,
            "given where there are `presets`, or `presets` empty",
        )
        require(all(0 < rate <= 1 for rate in self.rates), "rates", self.rates, "numbers in (0, 1]")
        require(0 < self.prefix < self.length - 1, "prefix", self.prefix, "below `length` by two at least")
        require(self.read >= self.length, "read", self.read, "at least `length`")
        for key in ("windows", "step"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")


def measure(config: FidelityConfig) -> Iterator[dict[str, Any]]:
    """Yield the record of this run after each text."""
    model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device), load_tokenizer(config.model)
    check_length(model, config.length, "length")
    texts = {
        label: windows_of(block_1X[0], config.length, config.windows)
        for label, block_1X in read_texts(config.texts, tokenizer, config.read, 1).items()
    }
    makers = _makers(config, model)
    record = run_record.new_record(
        "quality",
        config=to_dict(config) | {"measured": "fidelity", "model": name_of(config.model)},
        inputs=[
            *([] if config.bases is None else [path_input("bases", config.bases)]),
            *(path_input("checkpoint", each.directory) for each in config.checkpoints),
            model_input(model),
            *(token_input("text", *text) for text in texts.items()),
        ],
        n={"windows": sum(map(len, texts.values())), "tokens": sum(windows.numel() for windows in texts.values())},
        device=str(model.device),
    )
    rows: list[dict[str, Any]] = []
    for label, windows_NT in texts.items():
        scores: dict[str, list[WindowScore]] = {name: [] for name in makers}
        for name, score in fidelity(model, windows_NT, makers, prefix=config.prefix, step=config.step):
            scores[name].append(score)
        rows += [{"method": name, "dataset": label, **summary(each)} for name, each in scores.items()]
        yield record | {"rows": rows}


def _makers(config: FidelityConfig, model: PreTrainedModel) -> dict[str, Callable[[], Cache]]:
    makers = {"full": lambda: full_cache(model)}
    for each in config.checkpoints:
        dynakv.attach(model, each.directory, prefill="exact")
        makers[each.label] = dynakv.DynaKVCache.maker(model)
        dynakv.detach(model)
    calibration = None if config.bases is None else Calibration.load(config.bases).for_model(model)
    for preset in config.presets:
        for rate in config.rates:
            plan = make_plan(calibration, OjaKVConfig.preset(preset, rate=rate))
            makers[f"{preset} {rate:g}"] = lambda plan=plan: OjaKVCache(model, plan)
    for peer in config.peers:
        makers[peer] = rotated_maker(model, peer) if peer in ROTATED else quantized_maker(model, peer)
    return makers


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = ["| text | method | bytes | perplexity ratio | KL | equal top-1 |", "|---|---|--:|--:|--:|--:|"]
    for row in rows:
        ratio, kl = (
            f"{row[key]:{form}} ({row[f'{key}_low']:{form}}–{row[f'{key}_high']:{form}})"
            for key, form in (("perplexity_ratio", ".3f"), ("kl", ".4f"))
        )
        lines.append(f"| {row['dataset']} | {row['method']} | {row['rate']:.3f} | {ratio} | {kl} | {row['top1']:.3f} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    results = {"flag": "--results", "type": cli.output_directory, "metavar": "DIR", "help": "where to write the record"}
    config, arguments = parse_config(FidelityConfig, argv, description=__doc__, extra=[results])
    for record in measure(config):
        if arguments.results:
            path = run_record.write(record, arguments.results)
    print(markdown(record["rows"]))
    if arguments.results:
        print(f"record: {path}")
