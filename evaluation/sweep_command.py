"""Train and measure a compressor at several retain rates or prices: the rate–quality curve of a recipe, or of several.

    lowrank-kv sweep --config sweep.yaml --output runs/sweep

with, for example, in sweep.yaml:

    train: train.yaml                                 # keys of `lowrank-kv train`
    targets: [0.2, 0.1]
    prefix: 512
    calibration: {name: TEXT.jsonl, tokens: 16384}
    texts:
      - {label: mine, name: HELDOUT.jsonl}            # that calibration and training have not read

and in train.yaml:

    model: MODEL
    dtype: bfloat16
    dataset: {name: TEXT.jsonl}
    optimizer: {steps: 200}

`--targets "" --alphas 1,4,16` holds prices fixed instead, for gates (`compressor.rank_policy: gate`). All runs start from
one calibration. Writes its record into `quality/` of the output directory after every run; a sweep started again with
the same output directory continues with the runs that are missing.
"""

from lowrank_kv.utils.config import parse_config
from lowrank_kv.utils.run_lock import run_lock

from .compare import markdown
from .output import output_argument
from .scores import by_points
from .sweep import SweepConfig, sweep


def main(argv: list[str]) -> None:
    config, arguments = parse_config(SweepConfig, argv, description=__doc__, extra=[output_argument("of the runs")])
    with run_lock(arguments.output):
        record, path = sweep(config, arguments.output)
    print(markdown(by_points(record)))
    print(f"record: {path}")
