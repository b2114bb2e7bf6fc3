"""Compare DynaKV with static bases and the full cache at equal bytes.

    python scripts/compare_ranks.py --config configs/compare-demo.yaml --output runs/demo/comparison

Writes the run's record into `quality/` of the output directory, anew after every measurement, and prints the table. Records
of earlier runs stay beside it.
"""

from evaluation.compare import CompareConfig, compare, markdown
from lowrank_kv.utils import cli, run_record
from lowrank_kv.utils.config import parse_config


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


if __name__ == "__main__":
    cli.run(main)
