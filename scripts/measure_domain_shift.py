"""Measure how far calibrated bases miss other text, and how much an online update mends (OjaKV, table 1).

    python scripts/measure_domain_shift.py --model MODEL --bases DIR --text address=address.jsonl --results results

Relative residual energy (RER) and overlap with the oracle's subspace (SO) of the calibrated, the adapted and the oracle
basis, for each head after rotation and for all heads together before it.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, installed or not

from evaluation.domain_shift import measure_shift
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.loading import DEVICE_HELP, load_model, load_tokenizer
from lowrank_kv.utils import cli, run_record
from lowrank_kv.utils.provenance import model_input, path_input, token_input
from lowrank_kv.utils.text_data import labelled_block
from ojakv import OjaKVConfig


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub id or directory")
    parser.add_argument("--bases", required=True, metavar="DIR", help="written by `lowrank-kv calibrate`")
    parser.add_argument("--text", required=True, action="append", metavar="LABEL=FILE", help="may be repeated")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens adapted to [default %(default)s]")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens measured after them [default %(default)s]")
    parser.add_argument("--rate", type=float, default=0.4, help="rank over width [default %(default)s]")
    parser.add_argument("--device", help=DEVICE_HELP)
    parser.add_argument(
        "--results", type=cli.output_directory, metavar="DIR", help="where to write the run record, e.g. results"
    )
    arguments = parser.parse_args(argv)

    model, tokenizer = load_model(arguments.model, device=arguments.device), load_tokenizer(arguments.model)
    calibration = Calibration.load(arguments.bases).for_model(model)
    plain = {"preconditioned": False, "learning_rate": 0.1, "prompt_steps": 1}
    common = {"rate": arguments.rate, "ranks": "fraction"}
    configs = {
        "per head, η = 0.1": OjaKVConfig.preset("ojakv-pf", **common, **plain),
        "per head, preconditioned": OjaKVConfig.preset("ojakv-pf", **common),
        "joint, η = 0.1": OjaKVConfig.preset("ojakv-joint", **common, **plain),
        "joint, preconditioned": OjaKVConfig.preset("ojakv-joint", **common),
    }
    inputs = [path_input("bases", arguments.bases), model_input(model)]
    rows = []
    for argument in arguments.text:
        label, tokens_T = labelled_block(argument, tokenizer, arguments.prefix + arguments.tokens)
        inputs.append(token_input("text", label, tokens_T))
        rows += measure_shift(model, calibration, label, tokens_T, prefix=arguments.prefix, configs=configs)
    print("| text | side | update | RER static | adapted | oracle | SO static | adapted |")
    print("|---|---|---|--:|--:|--:|--:|--:|")
    for static, adapted, oracle in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        errors = " | ".join(f"{row.relative_error:.3f}" for row in (static, adapted, oracle))
        overlaps = f"{static.overlap:.3f} | {adapted.overlap:.3f}"
        print(f"| {static.text} | {static.side} | {static.update} | {errors} | {overlaps} |")
    if arguments.results:
        settings = {name: value for name, value in vars(arguments).items() if name != "results"}
        record = run_record.new_record(
            "quality",
            config=settings | {"updates": {name: dataclasses.asdict(each) for name, each in configs.items()}},
            inputs=inputs,
            n={"texts": len(arguments.text), "tokens": len(arguments.text) * arguments.tokens},
            rows=map(dataclasses.asdict, rows),
            device=str(model.device),
        )
        print(f"record: {run_record.write(record, arguments.results)}")


if __name__ == "__main__":
    cli.run(main)
