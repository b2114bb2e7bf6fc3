"""`lowrank-kv train` in a checkout, installed or not: accelerate launch train_dynakv.py --help"""

from lowrank_kv.utils import cli
from training.command import main

if __name__ == "__main__":
    cli.run(main)
