"""Compare methods by their perplexity at equal bytes: DynaKV checkpoints, OjaKV presets, quantized caches, the full cache.

    lowrank-kv compare --config compare.yaml --output runs/comparison

Writes the run's record into `quality/` of the output directory, anew after every measurement, and prints the table. Records
of earlier runs stay beside it.
"""

from lowrank_kv.utils import cli, run_record
from lowrank_kv.utils.config import parse_config

from .compare import CompareConfig, compare, markdown


def main(argv: list[str]) -> None:
    output = {
        "flag": "--output",
        "type": cli.output_directory,
        "metavar": "DIR",
        "required": True,
        "help": "of the records",
    }
    config, arguments = parse_config(CompareConfig, argv, description=__doc__, extra=[output])
    for record in compare(config):
        path = run_record.write(record, arguments.output)
    print(markdown(record))
    print(f"record: {path}")
