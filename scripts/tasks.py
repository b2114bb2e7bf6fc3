"""`lowrank-kv tasks` in a checkout, installed or not: python scripts/tasks.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, installed or not

from evaluation.tasks.command import main
from lowrank_kv.utils import cli

if __name__ == "__main__":
    cli.run(main)
