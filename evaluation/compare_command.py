"""Compare methods at equal bytes: divergence from the uncompressed model, agreement and perplexity, with intervals.

    lowrank-kv compare --config compare.yaml --output runs/comparison

with, for example, in compare.yaml:

    model: MODEL
    bases: bases/mine                                 # of `lowrank-kv calibrate --read_gradients true`
    texts:
      - {label: mine, name: TEXT.jsonl}               # that calibration and training have not read
    methods:
      - {preset: adaptive-mixed, rates: [0.25, 0.1]}
      - {checkpoint: runs/mine/checkpoint}            # of `lowrank-kv train`
      - {peer: rotated-int4}

Every method reads the same windows of the same texts: a prompt, as serving reads it, then the text that is scored. A
second start with the same output measures only the missing cells. Writes the run's record into `quality/` of the output
directory, anew at least every minute, and prints the table. Records of earlier runs stay beside it. At the end it writes
`report.html`, the run's page.
"""

from lowrank_kv.utils.config import parse_config

from .compare import CompareConfig, compare, markdown
from .output import output_argument, write_while_measuring
from .page.command import write_page

REPORT = "report.html"


def main(argv: list[str]) -> None:
    config, arguments = parse_config(
        CompareConfig, argv, description=__doc__, extra=[output_argument("of the cells and the records")]
    )
    record, path = write_while_measuring(compare(config, arguments.output), arguments.output)
    print(markdown(record))
    write_page([record], arguments.output / REPORT)
    print(f"record: {path}\npage: {arguments.output / REPORT}")
