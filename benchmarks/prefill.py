"""Time to the first token of a prompt, compressed caches against uncompressed ones.

    python -m benchmarks.prefill --bases bases/demo --model MODEL --context 4096 --results results

Only speed is measured, on random tokens or on --text; beside it, which share of this machine's matrix rate an uncompressed
forward pass would take of that time. Before timing, every compressed cache is checked.
"""

import torch

from benchmarks.caches import DYNAMIC, PREALLOCATED, argument_parser, candidates, context_ids, prefill
from benchmarks.harness import count, interleaved_ms, write_results
from benchmarks.roofline import prompt_flops
from lowrank_kv.utils import cli
from lowrank_kv.utils.flops import matmul_flops


def main(argv: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--context", type=count, default=4096, help="tokens of the prompt [default %(default)s]")
    parser.add_argument("--repeats", type=count, default=3, help="prompts timed [default %(default)s]")
    arguments = parser.parse_args(argv)

    found = candidates(arguments, arguments.context)
    ids = context_ids(arguments, found[DYNAMIC][0], arguments.context)
    calls = {
        name: lambda model=model, make_cache=make_cache: prefill(model, ids, make_cache())
        for name, (model, make_cache) in found.items()
    }
    ms = interleaved_ms(calls, repeats=arguments.repeats)
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
        for name in ms
    ]
    line = (
        "{method:>14}  {ms_to_first_token:9.0f} ms  {ratio_to_dynamic_cache:.3f}× dynamic cache  "
        "{ratio_to_preallocated:.3f}× preallocated  {flop_fraction:.0%} of the FLOP/s"
    )
    for row in rows:
        print(line.format(**row))
    if arguments.results:
        write_results(arguments.results, "prefill", vars(arguments) | {"matmul_flops": rate}, rows, model=plain)


if __name__ == "__main__":
    cli.run(main)
