"""Measure what caches still find in a long prompt: key-value lookup, by method and share of bytes.

python scripts/measure_kv_retrieval.py --checkpoint runs/demo/checkpoint --evict 0.5 0.3 --results results
"""

import argparse
import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, installed or not

import dynakv
from dynakv.checkpoint import read_config
from evaluation.kv_retrieval import LookupScore, lookup_prompts, score_lookup
from evaluation.reading import full_cache
from lowrank_kv.hf.loading import DEVICE_HELP, DTYPES, load_model, load_tokenizer
from lowrank_kv.stores.quantization import CACHE_DTYPES
from lowrank_kv.utils import cli, run_record
from lowrank_kv.utils.provenance import content_input, model_input, path_input


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One method: `threshold` is the gate's τ, `keep` the share of the prompt's tokens kept, `rate` that of the full cache's
    bytes."""

    method: str
    threshold: float | None
    keep: float
    rate: float
    right: int
    asked: int
    share_of_full: float


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="DynaKV compressor checkpoint")
    parser.add_argument("--model", metavar="ID", help="hub id or directory [default: the checkpoint's base model]")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="[default %(default)s]")
    parser.add_argument("--facts", type=int, default=40, help="in each prompt, each twice [default %(default)s]")
    parser.add_argument("--prompts", type=int, default=50, help="how many are asked [default %(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[default %(default)s]")
    parser.add_argument(
        "--cache-dtypes", nargs="+", choices=CACHE_DTYPES, default=["model"], help="[default %(default)s]"
    )
    parser.add_argument(
        "--evict", type=float, nargs="+", default=[1.0], metavar="SHARE", help="shares of a prompt's tokens to keep"
    )
    parser.add_argument(
        "--thresholds",
        type=float,
        nargs="+",
        metavar="τ",
        help="of the gate; a lower one keeps more [default: the checkpoint's]",
    )
    parser.add_argument("--prefill", choices=["exact", "reconstructed"], default="exact", help="[default %(default)s]")
    parser.add_argument("--device", help=DEVICE_HELP)
    parser.add_argument(
        "--results", type=cli.output_directory, metavar="DIR", help="where to write the run record, e.g. results"
    )
    arguments = parser.parse_args(argv)

    checkpoint = read_config(arguments.checkpoint)
    name = os.path.expanduser(arguments.model) if arguments.model else checkpoint.base_model
    thresholds = arguments.thresholds or [checkpoint.compressor.threshold]
    chosen = [
        {
            "prefill": arguments.prefill,
            "cache_dtype": cache_dtype,
            "threshold": threshold,
            "eviction": {"keep_ratio": keep},
        }
        for cache_dtype, threshold, keep in itertools.product(arguments.cache_dtypes, thresholds, arguments.evict)
    ]
    for settings in chosen:
        checkpoint.compressor.overridden(**settings)  # what is refused is refused before minutes of the full cache
    model, tokenizer = load_model(name, dtype=arguments.dtype, device=arguments.device), load_tokenizer(name)
    pairs = lookup_prompts(arguments.prompts, arguments.facts, arguments.seed)
    inputs = [path_input("checkpoint", arguments.checkpoint), model_input(model)]
    inputs.append(content_input("text", "key-value pairs", json.dumps(pairs)))
    full = score_lookup(model, tokenizer, pairs, lambda: full_cache(model), description="full")
    rows = [row("full", None, 1.0, full, full)]
    for settings in chosen:
        dynakv.attach(model, arguments.checkpoint, **settings)
        cache_dtype, threshold, keep = (
            settings["cache_dtype"],
            settings["threshold"],
            settings["eviction"]["keep_ratio"],
        )
        method = "dynakv" if cache_dtype == "model" else f"dynakv {cache_dtype}"
        measured = score_lookup(
            model,
            tokenizer,
            pairs,
            lambda: dynakv.DynaKVCache.from_model(model),
            description=f"{method}, {keep:g} kept",
        )
        rows.append(row(method, threshold, keep, measured, full))
        dynakv.detach(model)
    print("| method | τ | tokens kept | byte rate | right | of the full cache's |")
    print("|---|--:|--:|--:|--:|--:|")
    for line in rows:
        print(
            "| {method} | {threshold} | {keep:.2f} | {rate:.3f} | {right}/{asked} | {share_of_full:.1%} |".format(
                **vars(line)
            )
        )
    if arguments.results:
        settings = {name: value for name, value in vars(arguments).items() if name != "results"}
        record = run_record.new_record(
            "quality",
            config=settings | {"model": name, "thresholds": thresholds},
            inputs=inputs,
            n={"prompts": arguments.prompts, "facts": arguments.facts},
            rows=map(dataclasses.asdict, rows),
            device=str(model.device),
        )
        print(f"record: {run_record.write(record, arguments.results)}")


def row(method: str, threshold: float | None, keep: float, measured: LookupScore, full: LookupScore) -> Row:
    return Row(
        method=method,
        threshold=threshold,
        keep=keep,
        rate=measured.rate,
        right=measured.right,
        asked=measured.asked,
        share_of_full=measured.right / max(full.right, 1),
    )


if __name__ == "__main__":
    cli.run(main)
