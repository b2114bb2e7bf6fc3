"""Compress the key-value cache of language models: plans of bits, learned (DynaKV) and online (OjaKV) low rank."""

import argparse
import importlib
import os
import sys

import lowrank_kv
from lowrank_kv.utils import cli
from lowrank_kv.utils.errors import UserError, nearest

PROGRAM = "lowrank-kv"
# Switches of bars for steps of a moment, such as loading weights: in a file each of their states would be a line.
_BARS_OF_OTHERS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
# Command → its module, imported when it runs, since most take seconds; and what it does.
COMMANDS = {
    "calibrate": (
        "lowrank_kv_cli.calibrate",
        "read a text once, for presets that need no training and for training to start from",
    ),
    "train": ("lowrank_kv_cli.training.command", "train a DynaKV compressor for a causal language model"),
    "launch": ("lowrank_kv_cli.launch", "start a command in several processes, as `accelerate launch` does"),
    "generate": ("lowrank_kv_cli.generate", "generate text from a compressed cache and report its bytes"),
    "serve": ("lowrank_kv_cli.serve", "serve a model with compressed caches through vLLM"),
    "compare": ("lowrank_kv_cli.evaluation.compare_command", "compare methods at equal bytes"),
    "tasks": ("lowrank_kv_cli.evaluation.tasks.command", "answer benchmarks of long prompts through compressed caches"),
    "lm-eval": (
        "lowrank_kv_cli.evaluation.lm_eval_harness.command",
        "lm-evaluation-harness that knows compressed caches",
    ),
    "hypothesis": (
        "lowrank_kv_cli.evaluation.hypothesis.command",
        "test whether what each head caches is of low rank, and judge it",
    ),
    "report": ("lowrank_kv_cli.evaluation.page.command", "show records of comparisons as one HTML page"),
    "sweep": ("lowrank_kv_cli.evaluation.sweep_command", "train and measure compressors at several retain rates"),
    "measure": (
        "lowrank_kv_cli.training.measure_command",
        "measure on a text how much a compressor keeps, for the pages of a server",
    ),
    "export": ("lowrank_kv_cli.export", "write a compressor in few bytes, to be shared"),
    "inspect": ("lowrank_kv_cli.inspect_command", "describe a checkpoint or calibration; predict a cache's bytes"),
}
EPILOG = """\
first steps, without training (MODEL is a hub id or a directory, and TEXT.jsonl has a document a line, under the key `text`):

    lowrank-kv calibrate --model MODEL --name TEXT.jsonl --tokens 61440 --read_gradients true \\
        --output bases/mine
    lowrank-kv generate --model MODEL --bases bases/mine --rate 0.1 --prompt @LONG_PROMPT.txt

with training:

    lowrank-kv train --model MODEL --dataset.name TEXT.jsonl --calibration.bases bases/mine \\
        --output runs/mine
    lowrank-kv compare --config compare.yaml --output runs/comparison  # `lowrank-kv compare --help` shows a compare.yaml

`lowrank-kv COMMAND --help` describes a command. `python -m lowrank_kv_cli` is the same program, for launchers:

    lowrank-kv launch -m lowrank_kv_cli train --config train.yaml  # or accelerate launch
"""


def main() -> None:
    """The console script; ``python -m lowrank_kv_cli`` is the same."""
    cli.run(dispatch)


def dispatch(argv: list[str]) -> None:
    """Run the command that `argv` begins with.

    Raises:
        UserError: there is no such command.
    """
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND ...",
        description=f"{__doc__}\n\ncommands:\n"
        + "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {_version()}")
    if not argv or argv[0].startswith("-"):
        unknown = parser.parse_known_args(argv)[1]
        if unknown:
            raise UserError(f"unknown argument `{unknown[0]}`; a command comes first: {', '.join(COMMANDS)}")
        parser.print_help()
        return
    name, *rest = argv
    if name not in COMMANDS:
        raise UserError(f"unknown command `{name}`; {nearest(name, list(COMMANDS), 'commands')}")
    if not sys.stderr.isatty():
        for switch in _BARS_OF_OTHERS:
            os.environ.setdefault(switch, "1")
    sys.argv = [f"{PROGRAM} {name}", *rest]  # argparse names the program by it, in usage and errors
    importlib.import_module(COMMANDS[name][0]).main(rest)


def _version() -> str:
    return lowrank_kv.__version__ or "(a checkout that is not installed)"


if __name__ == "__main__":
    main()
