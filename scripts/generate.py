"""`lowrank-kv generate` in a checkout, installed or not: python scripts/generate.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, installed or not

from lowrank_kv.utils import cli
from lowrank_kv_cli.generate import main

if __name__ == "__main__":
    cli.run(main)
