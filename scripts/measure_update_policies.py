"""Measure what fewer basis updates cost: periodic against triggered ones on long texts (OjaKV's future work).

python scripts/measure_update_policies.py --model MODEL --bases DIR --text book=book.jsonl --results results
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, installed or not

from evaluation.update_policies import continued, measure_updates
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
    parser.add_argument("--device", help=DEVICE_HELP)
    parser.add_argument(
        "--results", type=cli.output_directory, metavar="DIR", help="where to write the run record, e.g. results"
    )
    arguments = parser.parse_args(argv)

    model, tokenizer = load_model(arguments.model, device=arguments.device), load_tokenizer(arguments.model)
    calibration = Calibration.load(arguments.bases).for_model(model)

    def config(**settings) -> OjaKVConfig:
        return OjaKVConfig.preset(arguments.preset, rate=arguments.rate, **settings)

    configs = {
        "periodic": config(),
        **{f"triggered {t:g}": config(update="triggered", trigger=t) for t in arguments.triggers},
        "prompt only": config(decode_learning_rate=0.0),
    }
    inputs = [path_input("bases", arguments.bases), model_input(model)]
    rows = []
    for argument in arguments.text:
        label, tokens_T = labelled_block(argument, tokenizer, arguments.prefix + arguments.tokens)
        if arguments.generate:
            label, tokens_T = f"{label}, generated", continued(model, tokens_T[: arguments.prefix], arguments.tokens)
        inputs.append(token_input("text", label, tokens_T))
        rows += measure_updates(model, calibration, label, tokens_T, prefix=arguments.prefix, configs=configs)
    print("| text | updates | number | error of the cache | perplexity | byte rate |")
    print("|---|---|--:|--:|--:|--:|")
    for row in rows:
        print(
            "| {text} | {rule} | {updates:,} | {relative_error:.4f} | {perplexity:.3f} | {rate:.3f} |".format(
                **vars(row)
            )
        )
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
