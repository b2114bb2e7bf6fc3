"""Milliseconds per decoded token, end to end, of compressed caches against uncompressed ones at one context length.

    python -m benchmarks.generate_e2e --checkpoint runs/demo/checkpoint --bases bases/demo --context 4096 --results results

Only speed is measured, on random tokens or on --text; beside it, which share of this machine's copy bandwidth reading the
weights and the cache once would take of that time. Before timing, every compressed step is checked. By default one
update period of OjaKV is timed, so that its updates are in the mean. All caches are held at once; --caches leaves out those
that do not fit beside the two uncompressed ones.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from benchmarks.caches import (
    CHECKED_TOKENS,
    DYNAMIC,
    PREALLOCATED,
    Candidate,
    Candidates,
    argument_parser,
    candidates,
    context_ids,
    decoded,
    prefill,
)
from benchmarks.harness import check_close, count, interleaved_ms, write_results
from benchmarks.random_models import random_ids
from benchmarks.roofline import copy_bandwidth, read_bytes, weight_bytes
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.compile_decoding import compile_decoding
from lowrank_kv.utils import cli
from lowrank_kv.utils.progress import progress_bar

WARMUP = 2  # tokens


def main(argv: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--context", type=count, default=2048, help="cached tokens when the last one is timed [default %(default)s]"
    )
    parser.add_argument("--tokens", type=count, default=32, help="decoded tokens timed [default %(default)s]")
    parser.add_argument("--batch", type=count, default=1, help="sequences, all of one text [default %(default)s]")
    parser.add_argument(
        "--compile", action="store_true",
        help="compile all models' decoding alike (hf.compile_decoding), which takes up to a minute for each cache",
    )  # fmt: skip
    arguments = parser.parse_args(argv)

    found = candidates(arguments, arguments.context)
    if arguments.compile:
        compile_all(found, _in_fp32(arguments))
    ids = context_ids(arguments, found[DYNAMIC][0], arguments.context - arguments.tokens - WARMUP)
    ids = ids.expand(arguments.batch, -1)
    each = progress_bar(found.items(), unit="cache", desc="reading prompts")
    caches = {name: prefill(model, ids, make_cache()) for name, (model, make_cache) in each}
    rates = {name: cache.rate if isinstance(cache, LowRankCache) else 1.0 for name, cache in caches.items()}
    steps = {name: stepper(model, caches[name], arguments.batch) for name, (model, _) in found.items()}
    ms = interleaved_ms(steps, repeats=arguments.tokens, warmup=WARMUP, mean=True)
    bandwidth = copy_bandwidth(ids.device)
    print(f"copy {bandwidth / 1e9:.0f} GB/s")
    read = {name: weight_bytes(model) + read_bytes(caches[name]) for name, (model, _) in found.items()}
    rows = [
        {
            "method": name,
            "context": arguments.context,
            "batch": arguments.batch,
            "ms_per_token": ms[name],
            "ratio_to_dynamic_cache": ms[name] / ms[DYNAMIC],
            "ratio_to_preallocated": ms[name] / ms[PREALLOCATED],
            "rate": rates[name],
            "bandwidth_fraction": read[name] / ms[name] * 1e3 / bandwidth,
        }
        for name in ms
    ]
    line = (
        "{method:>14}  {ms_per_token:8.1f} ms/token  {ratio_to_dynamic_cache:.2f}× dynamic cache  "
        "{ratio_to_preallocated:.2f}× preallocated  rate {rate:.3f}  {bandwidth_fraction:.0%} of the bandwidth"
    )
    for row in rows:
        print(line.format(**row))
    if arguments.results:
        write_results(
            arguments.results,
            "generate_e2e",
            vars(arguments) | {"copy_bandwidth": bandwidth},
            rows,
            model=found[DYNAMIC][0],
        )


def stepper(model: PreTrainedModel, cache: Cache, batch: int) -> Callable[[], None]:
    """What decodes one more token of each of `batch` sequences that a cache holds."""
    token = torch.full((batch, 1), 11, device=model.device)

    @torch.no_grad()
    def step() -> None:
        model(token, past_key_values=cache, logits_to_keep=1)

    return step


def compile_all(candidates: Candidates, exact: dict[str, Tensor]) -> None:
    """Compile every model's decoding and check that each candidate's decoded step is still the one it was.

    Args:
        exact: what the steps give in fp32, in half precision: compiled and uncompiled code round otherwise, so that neither
            is the other's measure.
    """
    expected = {name: _checked(candidate) for name, candidate in candidates.items()}
    for model in {id(model): model for model, _ in candidates.values()}.values():
        compile_decoding(model)
    for name, candidate in candidates.items():
        check_close(name, _checked(candidate), expected[name], (lambda name=name: exact[name]) if exact else None)


def _in_fp32(arguments: argparse.Namespace) -> dict[str, Tensor]:
    """What each cache's checked step gives in fp32; nothing where the run is in fp32."""
    if arguments.dtype == "float32":
        return {}
    same = argparse.Namespace(**{**vars(arguments), "dtype": "float32"})
    return {name: _checked(candidate) for name, candidate in candidates(same, arguments.context).items()}


def _checked(candidate: Candidate) -> Tensor:
    model, make_cache = candidate
    return decoded(model, random_ids(model, CHECKED_TOKENS), make_cache())


if __name__ == "__main__":
    cli.run(main)
