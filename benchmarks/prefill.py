"""Time to the first token of a prompt, compressed caches against uncompressed ones.

    python -m benchmarks.prefill --bases bases/demo --model MODEL --context 4096 --json out.json

Only speed is measured, on random tokens or on --text. Before timing, every compressed cache is checked.
"""

from benchmarks.candidates import DYNAMIC, argument_parser, candidates, context_ids, prefill
from benchmarks.harness import interleaved_ms, write_results
from lowrank import cli


def main(argv: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--context", type=int, default=4096, help="tokens of the prompt [default %(default)s]")
    parser.add_argument("--repeats", type=int, default=3, help="prompts timed [default %(default)s]")
    arguments = parser.parse_args(argv)

    found = candidates(arguments, arguments.context)
    ids = context_ids(arguments, found[DYNAMIC][0])
    calls = {
        name: lambda model=model, make_cache=make_cache: prefill(model, ids, make_cache())
        for name, (model, make_cache) in found.items()
    }
    ms = interleaved_ms(calls, repeats=arguments.repeats)
    rows = [
        {
            "method": name,
            "context": arguments.context,
            "ms_to_first_token": ms[name],
            "ratio_to_dynamic_cache": ms[name] / ms[DYNAMIC],
        }
        for name in ms
    ]
    for row in rows:
        print("{method:>14}  {ms_to_first_token:9.0f} ms  {ratio_to_dynamic_cache:.3f}× dynamic cache".format(**row))
    if arguments.json:
        write_results(arguments.json, "prefill", vars(arguments), rows)


if __name__ == "__main__":
    cli.run(main)
