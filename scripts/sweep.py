"""Train and measure a compressor at several retain rates or prices: the rate–quality curve of a recipe, or of several.

    python scripts/sweep.py --config configs/sweep-demo.yaml --output runs/sweep
    python scripts/sweep.py --config configs/sweep-demo.yaml --output runs/prices --variants "" --targets "" --alphas 1,4,16

All runs start from one calibration. Writes its record into `quality/` of the output directory after every run; started again
with the same output directory it goes on with what is missing.
"""

import sys
from pathlib import Path

from evaluation.compare import markdown
from evaluation.sweep import SweepConfig, sweep
from lowrank_kv.utils import cli
from lowrank_kv.utils.config import parse_config

TRAIN = Path(__file__).parent.parent / "train_dynakv.py"


def main(argv: list[str]) -> None:
    output = {
        "flag": "--output",
        "type": cli.output_directory,
        "metavar": "DIR",
        "required": True,
        "help": "of the runs",
    }
    config, arguments = parse_config(SweepConfig, argv, description=__doc__, extra=[output])
    print(markdown(sweep(config, arguments.output, [*(config.launch or [sys.executable]), str(TRAIN)])))


if __name__ == "__main__":
    cli.run(main)
