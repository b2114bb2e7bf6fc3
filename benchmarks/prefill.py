"""Time to the first token of a prompt, compressed caches against uncompressed ones.

    python -m benchmarks.prefill --bases bases/demo --model MODEL --context 4096 --results results

Only speed is measured, on random tokens or on --text; beside it, which share of this machine's matrix rate an uncompressed
forward pass would take of that time. With --turn, the time to the first token of later turns of a conversation, too, which
are read behind the prompt. Before timing, every compressed cache is checked.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from benchmarks.caches import DYNAMIC, PREALLOCATED, argument_parser, candidates, context_ids, prefill
from benchmarks.harness import count, interleaved_ms, write_results
from benchmarks.roofline import prompt_flops
from lowrank_kv.utils import cli
from lowrank_kv.utils.flops import matmul_flops

WARMUP = 1  # calls that are not timed


def main(argv: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--context", type=count, default=4096, help="tokens of the prompt [default %(default)s]")
    parser.add_argument("--repeats", type=count, default=3, help="prompts timed [default %(default)s]")
    parser.add_argument("--turn", type=count, metavar="TOKENS", help="time later turns of so many tokens, too")
    arguments = parser.parse_args(argv)

    turns = arguments.turn * (WARMUP + arguments.repeats) if arguments.turn else 0
    found = candidates(arguments, arguments.context + turns)
    text = context_ids(arguments, found[DYNAMIC][0], arguments.context + turns)
    ids = text[:, : arguments.context]
    calls = {
        name: lambda model=model, make_cache=make_cache: prefill(model, ids, make_cache())
        for name, (model, make_cache) in found.items()
    }
    ms = interleaved_ms(calls, repeats=arguments.repeats, warmup=WARMUP)
    turn_ms = {}
    if arguments.turn:
        turn_ms = interleaved_ms(
            {name: _turns(*each, text, arguments) for name, each in found.items()},
            repeats=arguments.repeats,
            warmup=WARMUP,
        )
    plain, rate = found[DYNAMIC][0], matmul_flops(ids.device, getattr(torch, arguments.dtype))
    print(f"matrix product {rate / 1e12:.2f} TFLOP/s")
    rows = [
        {
            "method": name,
            "context": arguments.context,
            "ms_to_first_token": ms[name],
            "ratio_to_dynamic_cache": ms[name] / ms[DYNAMIC],
            "ratio_to_preallocated": ms[name] / ms[PREALLOCATED],
            "flop_fraction": prompt_flops(plain, arguments.context) / ms[name] * 1e3 / rate,
        }
        | _later_turn(turn_ms, name)
        for name in ms
    ]
    line = (
        "{method:>14}  {ms_to_first_token:9.0f} ms  {ratio_to_dynamic_cache:.3f}× dynamic cache  "
        "{ratio_to_preallocated:.3f}× preallocated  {flop_fraction:.0%} of the FLOP/s"
    )
    if turn_ms:
        line += "; a later turn {ms_to_first_token_of_turn:7.0f} ms  {turn_ratio_to_dynamic_cache:.3f}×"
    for row in rows:
        print(line.format(**row))
    if arguments.results:
        write_results(arguments.results, "prefill", vars(arguments) | {"matmul_flops": rate}, rows, model=plain)


def _turns(
    model: PreTrainedModel, make_cache: Callable[[], Cache], text: Tensor, arguments: argparse.Namespace
) -> Callable[[], Any]:
    """Each call reads the next turn behind what one cache has read, the prompt at first."""
    prompt, *turns = text.split([arguments.context] + [arguments.turn] * (WARMUP + arguments.repeats), dim=1)
    cache, left = prefill(model, prompt, make_cache()), iter(turns)
    return lambda: prefill(model, next(left), cache)


def _later_turn(turn_ms: dict[str, float], name: str) -> dict[str, float]:
    """A row's fields of later turns; none where they were not timed."""
    if not turn_ms:
        return {}
    ms = turn_ms[name]
    return {"ms_to_first_token_of_turn": ms, "turn_ratio_to_dynamic_cache": ms / turn_ms[DYNAMIC]}


if __name__ == "__main__":
    cli.run(main)
