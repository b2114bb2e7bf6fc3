"""Test the low-rank hypothesis of SubSpace: is what each head caches of low rank, and does compressing it so cost nothing?

    lowrank-kv hypothesis --config hypothesis.yaml --output runs/hypothesis --fraction 0.25

with, for example, in hypothesis.yaml:

    model: MODEL
    dtype: bfloat16
    calibration: {name: TEXT.jsonl, tokens: 16384}
    texts:
      - {label: mine, name: HELDOUT.jsonl}            # that the calibration has not read
      - {label: other, name: OTHER.txt}
    familiar: [mine]                                  # of the kind that the bases were calibrated on

Measures perplexity over ranks, thresholds of energy, keys and values alone, both sides of the rotation, uniform and
adaptive ranks, global and online bases, 8 bits, and single layers and heads; then judges H0 and every falsifier by rules.
A second start with the same output measures only the missing cells. Writes the run's record into `quality/` of the output
directory, anew at least every minute, and prints the verdicts.
"""

from lowrank_kv.utils.config import parse_config

from ..output import output_argument, write_while_measuring
from .config import HypothesisConfig
from .page import markdown
from .suite import run_suite


def main(argv: list[str]) -> None:
    config, arguments = parse_config(
        HypothesisConfig, argv, description=__doc__, extra=[output_argument("of the cells and the records")]
    )
    record, path = write_while_measuring(run_suite(config, arguments.output), arguments.output)
    print(markdown(record))
    print(f"record: {path}")
