"""Measure what fewer basis updates cost: periodic against triggered ones on long texts (OjaKV's future work).

python scripts/measure_update_policies.py --model MODEL --bases DIR --text book=book.jsonl --results results
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, installed or not

from evaluation.update_policies import continued, measure_updates
from lowrank_kv.utils import cli
from ojakv import OjaKVConfig
from scripts.text_measurements import argument_parser, measured


def main(argv: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--preset", default="ojakv-joint", help="[default %(default)s]")
    parser.add_argument("--rate", type=float, default=0.4, help="of the preset [default %(default)s]")
    parser.add_argument("--prefix", type=int, default=256, help="tokens of the prompt [default %(default)s]")
    parser.add_argument("--tokens", type=int, default=1792, help="tokens after it [default %(default)s]")
    parser.add_argument(
        "--generate",
        action="store_true",
        help="those tokens are what the uncompressed model samples, not the text's own",
    )
    parser.add_argument(
        "--triggers", type=float, nargs="*", default=[0.2, 0.5, 1.0], help="thresholds [default %(default)s]"
    )
    arguments = parser.parse_args(argv)

    def config(**settings) -> OjaKVConfig:
        return OjaKVConfig.preset(arguments.preset, rate=arguments.rate, **settings)

    configs = {
        "periodic": config(),
        **{f"triggered {t:g}": config(update="triggered", trigger=t) for t in arguments.triggers},
        "prompt only": config(decode_learning_rate=0.0),
    }

    def measure(model, calibration, label, tokens_T):
        if arguments.generate:
            label, tokens_T = f"{label}, generated", continued(model, tokens_T[: arguments.prefix], arguments.tokens)
        rows = measure_updates(model, calibration, label, tokens_T, prefix=arguments.prefix, configs=configs)
        return label, tokens_T, rows

    rows = measured(arguments, configs, measure)
    print("| text | updates | number | error of the cache | perplexity | byte rate |")
    print("|---|---|--:|--:|--:|--:|")
    for row in rows:
        print(
            "| {text} | {rule} | {updates:,} | {relative_error:.4f} | {perplexity:.3f} | {rate:.3f} |".format(
                **vars(row)
            )
        )


if __name__ == "__main__":
    cli.run(main)
