"""Compare DynaKV with static bases and the full cache at equal bytes.

    python scripts/compare_ranks.py --config configs/compare-demo.yaml --output runs/demo/comparison

Writes comparison.json, comparison.md and pareto.png into the output directory, anew after every measurement, and prints the
table.
"""

from evaluation.compare import CompareConfig, compare, markdown, write_comparison
from lowrank_kv.utils import cli
from lowrank_kv.utils.config import parse_config


def main(argv: list[str]) -> None:
    output = {
        "flag": "--output",
        "type": cli.output_directory,
        "metavar": "DIR",
        "required": True,
        "help": "of the results",
    }
    config, arguments = parse_config(CompareConfig, argv, description=__doc__, extra=[output])
    for model, rows in compare(config):
        write_comparison(arguments.output, model, rows)
    print(markdown(model, rows))


if __name__ == "__main__":
    cli.run(main)
