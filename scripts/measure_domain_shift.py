"""Measure how far calibrated bases miss other text, and how much an online update mends (OjaKV, table 1).

    python scripts/measure_domain_shift.py --model MODEL --bases DIR --text address=address.jsonl --results results

The residual-energy ratio (RER) and the overlap with the oracle's subspace (SO) of the calibrated, the adapted and the oracle
basis, for each head after rotation and for all heads together before it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, installed or not

from evaluation.domain_shift import measure_shift
from lowrank_kv.utils import cli
from ojakv import OjaKVConfig
from scripts.text_measurements import argument_parser, measured


def main(argv: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--prefix", type=int, default=1024, help="tokens adapted to [default %(default)s]")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens measured after them [default %(default)s]")
    parser.add_argument("--rate", type=float, default=0.4, help="rank over width [default %(default)s]")
    arguments = parser.parse_args(argv)

    plain = {"preconditioned": False, "learning_rate": 0.1, "prompt_steps": 1}
    common = {"rate": arguments.rate, "ranks": "fraction"}
    configs = {
        "per head, η = 0.1": OjaKVConfig.preset("ojakv-pf", **common, **plain),
        "per head, preconditioned": OjaKVConfig.preset("ojakv-pf", **common),
        "joint, η = 0.1": OjaKVConfig.preset("ojakv-joint", **common, **plain),
        "joint, preconditioned": OjaKVConfig.preset("ojakv-joint", **common),
    }

    def measure(model, calibration, label, tokens_T):
        rows = measure_shift(model, calibration, label, tokens_T, prefix=arguments.prefix, configs=configs)
        return label, tokens_T, rows

    rows = measured(arguments, configs, measure)
    print("| text | side | update | RER static | adapted | oracle | SO static | adapted |")
    print("|---|---|---|--:|--:|--:|--:|--:|")
    for static, adapted, oracle in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        errors = " | ".join(f"{row.relative_error:.3f}" for row in (static, adapted, oracle))
        overlaps = f"{static.overlap:.3f} | {adapted.overlap:.3f}"
        print(f"| {static.text} | {static.side} | {static.update} | {errors} | {overlaps} |")


if __name__ == "__main__":
    cli.run(main)
