"""What scripts that measure updates of bases on long texts have in common: arguments, what is loaded, and the record."""

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.loading import DEVICE_HELP, load_model, load_tokenizer
from lowrank_kv.utils import cli, run_record
from lowrank_kv.utils.provenance import model_input, path_input, token_input
from lowrank_kv.utils.text_data import labelled_block
from ojakv import OjaKVConfig

Measure = Callable[[PreTrainedModel, Calibration, str, Tensor], tuple[str, Tensor, Iterable[Any]]]


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the arguments that :func:`measured` reads, for a script to add its own to."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub id or directory")
    parser.add_argument("--bases", required=True, metavar="DIR", help="written by `lowrank-kv calibrate`")
    parser.add_argument("--text", required=True, action="append", metavar="LABEL=FILE", help="may be repeated")
    parser.add_argument("--device", help=DEVICE_HELP)
    parser.add_argument(
        "--results", type=cli.output_directory, metavar="DIR", help="where to write the run record, e.g. results"
    )
    return parser


def measured(arguments: argparse.Namespace, configs: Mapping[str, OjaKVConfig], measure: Measure) -> list[Any]:
    """Rows of all texts; they are also written into a record where `--results` names a directory.

    Args:
        arguments: with `prefix` and `tokens`, the lengths of each text's two parts.
        configs: what is compared, for the record.
        measure: (model, calibration, label, token ids) → label and token ids that were read, and their rows, which are data
            classes.
    """
    model, tokenizer = load_model(arguments.model, device=arguments.device), load_tokenizer(arguments.model)
    calibration = Calibration.load(arguments.bases).for_model(model)
    inputs = [path_input("bases", arguments.bases), model_input(model)]
    rows = []
    for argument in arguments.text:
        label, tokens_T = labelled_block(argument, tokenizer, arguments.prefix + arguments.tokens)
        label, tokens_T, found = measure(model, calibration, label, tokens_T)
        inputs.append(token_input("text", label, tokens_T))
        rows += found
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
    return rows
